//! A combination of styles: a row of `combinations.txt`, with the model, the batch, the mesh and the plan that it stands for.

use shardgrad_nn::{ExpertsConfig, Gpt2Config, LanguageModel, LlamaConfig, LlamaKind, ModelConfig, Plan};

/// The table: a head with the names of columns, and one combination per line. `-` means that a style is absent, `ring=3` the style and
/// the number of ranks of its axis.
const TABLE: &str = include_str!("combinations.txt");

/// The number of first rows that run with every `cargo test`. They hold every style.
pub(crate) const NUM_IN_GATE: usize = 5;

/// The columns that say how a model is trained; the others say what is trained on which batches.
pub(crate) const STYLES: [&str; 8] =
    ["pipeline", "dp", "shards", "context", "experts", "tp", "sequence", "recompute"];

/// A word for each column of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Combination(Vec<&'static str>);

/// The names of the columns.
pub(crate) fn columns() -> Vec<&'static str> {
    TABLE.lines().next().unwrap_or_default().split_whitespace().collect()
}

/// All combinations of the table.
pub(crate) fn combinations() -> Vec<Combination> {
    TABLE.lines().skip(1).map(|line| Combination(line.split_whitespace().collect())).collect()
}

/// What is trained: a model on batches of a size.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    pub(crate) model: ModelConfig,
    pub(crate) microbatches: usize,
    /// The rows of the global batch.
    pub(crate) rows: usize,
    pub(crate) tokens: usize,
    pub(crate) vocabulary: usize,
}

/// How a model is trained.
#[derive(Clone, Debug)]
pub(crate) struct Style {
    pub(crate) mesh: String,
    pub(crate) plan: Plan,
    pub(crate) recompute: bool,
}

impl Style {
    /// One rank.
    pub(crate) fn alone() -> Style {
        Style { mesh: String::new(), plan: Plan::new(), recompute: false }
    }
}

impl Combination {
    /// The word in a column.
    pub(crate) fn word(&self, column: &str) -> &'static str {
        let at = columns().iter().position(|name| *name == column);
        self.0[at.unwrap_or_else(|| panic!("the table has no column {column}"))]
    }

    /// The same combination with another word in a column.
    pub(crate) fn with(&self, column: &str, word: &'static str) -> Combination {
        let change = |(known, name): (&&'static str, &str)| if name == column { word } else { *known };
        Combination(self.0.iter().zip(columns()).map(change).collect())
    }

    /// The same model and batches in the styles of another combination.
    pub(crate) fn in_styles_of(&self, other: &Combination) -> Combination {
        STYLES.into_iter().fold(self.clone(), |c, column| c.with(column, other.word(column)))
    }

    /// The levels: each column with its word.
    pub(crate) fn levels(&self) -> Vec<(&'static str, &'static str)> {
        columns().into_iter().zip(self.0.iter().copied()).collect()
    }

    /// The style in a column, without its number of ranks.
    fn style(&self, column: &str) -> &'static str {
        let word = self.word(column);
        word.split_once('=').map_or(word, |(style, _)| style)
    }

    /// The number of ranks of the axis of a column.
    fn num_ranks(&self, column: &str) -> usize {
        let word = self.word(column);
        let number = word.split_once('=').map_or(word, |(_, ranks)| ranks);
        number.parse().unwrap_or(1)
    }

    fn is_on(&self, column: &str) -> bool {
        self.word(column) == "yes"
    }

    fn is_odd(&self, column: &str) -> bool {
        self.word(column) == "odd"
    }

    /// The number of ranks in all.
    pub(crate) fn num_ranks_in_all(&self) -> usize {
        AXES.into_iter().map(|(_, column)| self.num_ranks(column)).product()
    }

    pub(crate) fn task(&self) -> Task {
        let vocabulary = if self.is_odd("vocabulary") { 11 } else { 12 };
        let tokens = if self.is_odd("tokens") { 5 } else { 6 };
        let (heads, key_heads) = if self.is_odd("heads") { (3, 3) } else { (4, 2) };
        let kind = if self.word("model") == "mixtral" { LlamaKind::Mixtral } else { LlamaKind::Llama };
        let model = match self.word("model") {
            "gpt2" => {
                let width = if self.is_odd("heads") { 15 } else { 16 };
                Gpt2Config { initializer_range: 0.3, ..Gpt2Config::new(vocabulary, tokens, width, 2, heads) }
                    .into()
            }
            _ => LlamaConfig {
                head_dim: 4,
                initializer_range: 0.3,
                experts: (kind == LlamaKind::Mixtral).then(|| ExpertsConfig {
                    output_router_logits: true,
                    router_aux_loss_coef: 0.1,
                    ..ExpertsConfig::new(5, 2, 7)
                }),
                ..LlamaConfig::new(kind, vocabulary, tokens, [10, 7], 2, [heads, key_heads])
            }
            .into(),
        };
        let microbatches = self.num_ranks("microbatches");
        let rows = microbatches * if self.is_odd("rows") { 3 } else { 4 };
        Task { model, microbatches, rows, tokens, vocabulary }
    }

    pub(crate) fn how(&self) -> Style {
        let plan = LanguageModel::plan(&self.task().model);
        let plan = match self.style("pipeline") {
            "-" => plan,
            schedule => plan.pipeline_schedule(schedule),
        };
        let plan = match self.style("context") {
            "ring" => plan.ring(),
            "exchange" => plan.exchange(),
            _ => plan,
        };
        let plan = match self.style("experts") {
            "gather" => plan.gather_experts(),
            "exchange" => plan.exchange_experts(),
            _ => plan,
        };
        let plan = if self.is_on("sequence") { plan.and(Plan::sequence_parallel("tp")) } else { plan };
        let plan = match self.style("shards") {
            "zero1" => plan.and(Plan::zero(1, "dp")),
            "zero2" => plan.and(Plan::zero(2, "dp")),
            "zero3" => plan.and(Plan::zero(3, "dp")),
            _ => plan,
        };
        let axes = AXES.into_iter().map(|(axis, column)| (axis, self.num_ranks(column)));
        let mesh: Vec<String> = axes.filter(|(_, n)| *n > 1).map(|(axis, n)| format!("{axis}={n}")).collect();
        Style { mesh: mesh.join(","), plan, recompute: self.is_on("recompute") }
    }
}

/// The axes of a mesh in their order, and the column that gives the size of each.
const AXES: [(&str, &str); 6] = [
    ("pp", "pipeline"),
    ("dp", "dp"),
    ("fsdp", "shards"),
    ("ep", "experts"),
    ("cp", "context"),
    ("tp", "tp"),
];
