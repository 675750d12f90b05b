//! BERT: an encoder with learned positions and norms behind its halves. Devlin et al., arXiv 1810.04805.

use super::family::{Family, check_ids, through};
use crate::hf::{BertConfig, BertHead, ModelConfig};
use crate::layer::{Dropout, Embedding, LayerNorm, Linear, SelfAttention};
use crate::loss::CrossEntropy;
use crate::module;
use crate::param::{Init, Param};
use crate::plan::Plan;
use crate::point::Point;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Elementwise, Error, Kind, Value};

/// What is added to the score of a key that stands for nothing. Its exponential is zero beside that of any other score, and
/// every float dtype holds it.
const HIDDEN: f64 = -3e4;

module! {
    /// Sums of three tables, and a norm.
    #[derive(Debug)]
    pub struct BertEmbeddings {
        /// Tokens: `[vocab_size, hidden_size]`.
        pub word_embeddings: Embedding,
        /// Positions: `[max_position_embeddings, hidden_size]`.
        pub position_embeddings: Embedding,
        /// Types: `[type_vocab_size, hidden_size]`.
        pub token_type_embeddings: Embedding,
        /// The norm of the sum.
        pub norm: LayerNorm,
        drop: Dropout,
    }
}

module! {
    /// attention_norm(x + attention(x)), then norm(x + output(gelu(intermediate(x)))), with dropout before each addition.
    #[derive(Debug)]
    pub struct BertBlock {
        /// Attention.
        pub attention: SelfAttention,
        attention_drop: Dropout,
        /// The norm behind attention.
        pub attention_norm: LayerNorm,
        /// `[d]` to the hidden units of the feed-forward half.
        pub intermediate: Linear,
        /// Hidden units to `[d]`.
        pub output: Linear,
        output_drop: Dropout,
        /// The norm behind the feed-forward half.
        pub norm: LayerNorm,
    }
}

module! {
    /// Scores of the token at each place: a product, GELU, a norm, and a product with the token table or one of its own.
    #[derive(Debug)]
    pub struct TokenHead {
        /// `[d]` to `[d]`.
        pub dense: Linear,
        /// The norm behind GELU.
        pub norm: LayerNorm,
        /// The output layer where it is not tied: `[vocab_size, hidden_size]`.
        pub decoder: Option<Embedding>,
        /// `[vocab_size]`.
        pub bias: Param,
    }
}

module! {
    /// Embeddings, blocks, and what stands behind them. A point `mask`: what all blocks read of the tokens that stand, `[b, t]`.
    #[derive(Debug)]
    pub struct Bert {
        /// The embeddings.
        pub embeddings: BertEmbeddings,
        /// The blocks.
        pub layer: Vec<BertBlock>,
        /// Of the first token: `[d]` to `[d]`, then tanh.
        pub pooler: Option<Linear>,
        /// Scores of tokens.
        pub head: Option<TokenHead>,
        mask: Point;
        config: BertConfig,
        recompute: bool,
    }
}

impl BertBlock {
    #[track_caller]
    fn new(config: &BertConfig) -> BertBlock {
        let (d, std) = (config.hidden_size, Init::Normal(config.initializer_range));
        let norm = || LayerNorm::new(d).eps(config.layer_norm_eps);
        let drop = || Dropout::new(config.hidden_dropout_prob);
        let linear = |from, to| Linear::new(from, to).transposed_in_files().init(std);
        BertBlock {
            attention: SelfAttention::new(d, config.num_attention_heads)
                .init(std)
                .dropout(config.attention_probs_dropout_prob),
            attention_drop: drop(),
            attention_norm: norm(),
            intermediate: linear(d, config.intermediate_size),
            output: linear(config.intermediate_size, d),
            output_drop: drop(),
            norm: norm(),
        }
    }

    /// `[b, t, d]` to `[b, t, d]`, with a mask as [`SelfAttention::forward`] takes it.
    ///
    /// # Panics
    /// Unwinds with an error if x has another shape.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var, mask: Option<&Var>) -> Var {
        let attended = if self.attention_drop.is_off(x.tape()) {
            self.attention.forward_onto(x, mask, x)
        } else {
            x.add(&self.attention_drop.forward(&self.attention.forward(x, mask)))
        };
        let x = self.attention_norm.forward(&attended);
        let hidden = self.intermediate.forward(&x).gelu_exact();
        let fed = if self.output_drop.is_off(x.tape()) {
            self.output.forward_onto(&hidden, &x)
        } else {
            x.add(&self.output_drop.forward(&self.output.forward(&hidden)))
        };
        self.norm.forward(&fed)
    }
}

impl Bert {
    /// The label of a place where no token is asked for.
    pub const IGNORED: i64 = -100;

    /// A model of this shape. Fresh weights are normal with standard deviation `initializer_range`; biases are zero, norms
    /// one.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if the heads do not divide the width, or a dropout probability is not in `0..1`.
    #[track_caller]
    #[must_use]
    pub fn new(config: &BertConfig) -> Bert {
        let (d, std) = (config.hidden_size, Init::Normal(config.initializer_range));
        let table = |rows| Embedding::new(rows, d).init(std);
        let norm = || LayerNorm::new(d).eps(config.layer_norm_eps);
        let square = || Linear::new(d, d).transposed_in_files().init(std);
        let head = || TokenHead {
            dense: square(),
            norm: norm(),
            decoder: (!config.tie_word_embeddings).then(|| table(config.vocab_size)),
            bias: Param::new(&[config.vocab_size]),
        };
        Bert {
            embeddings: BertEmbeddings {
                word_embeddings: table(config.vocab_size),
                position_embeddings: table(config.max_position_embeddings),
                token_type_embeddings: table(config.type_vocab_size),
                norm: norm(),
                drop: Dropout::new(config.hidden_dropout_prob),
            },
            layer: (0..config.num_hidden_layers).map(|_| BertBlock::new(config)).collect(),
            pooler: (config.head == BertHead::Pooler).then(square),
            head: (config.head == BertHead::Tokens).then(head),
            mask: Point::default(),
            config: config.clone(),
            recompute: false,
        }
    }

    /// The same model, which keeps only the inputs of its blocks for the backward pass and computes the rest again there.
    #[must_use]
    pub fn recompute(self, recompute: bool) -> Bert {
        Bert { recompute, ..self }
    }

    /// The table of splits for this family: rows of the batch and their tokens; heads, hidden units and vocabulary.
    #[must_use]
    pub fn plan(_: &BertConfig) -> Plan {
        Plan::bert()
    }

    /// The shape of the model.
    #[must_use]
    pub fn config(&self) -> &BertConfig {
        &self.config
    }

    /// A vector for each place: `[b, t]` (i64) to `[b, t, d]`. `mask` is 1 where a token stands and 0 where a row is filled up
    /// (i64, `[b, t]`; all ones if there is none), `types` are the types of the tokens (i64, `[b, t]`; all 0 if there are
    /// none). Vectors at places that are filled up mean nothing.
    ///
    /// # Panics
    /// Unwinds with `Kind::Shape` if the ids have other dims, or `t` exceeds `max_position_embeddings`.
    #[track_caller]
    #[must_use]
    pub fn hidden(&self, ids: &Var, mask: Option<&Var>, types: Option<&Var>) -> Var {
        check_ids(ids, 0, self.config.max_position_embeddings);
        self.encoded(ids, mask, types)
    }

    /// [`Bert::hidden`] of ids that fit. What is asked for here is asked for by this text, not by its caller.
    fn encoded(&self, ids: &Var, mask: Option<&Var>, types: Option<&Var>) -> Var {
        let BertEmbeddings { word_embeddings, position_embeddings, token_type_embeddings, norm, drop } =
            &self.embeddings;
        let words = word_embeddings.forward(ids);
        let typed = match types {
            Some(types) => words.add(&token_type_embeddings.forward(types)),
            None => words.add(&token_type_embeddings.first(ids, 1).reshape(&[self.config.hidden_size])),
        };
        let x = drop.forward(&norm.forward(&typed.add(&position_embeddings.first(ids, ids.shape()[1]))));
        let mask = mask.map(|mask| self.mask.at(mask).cast(x.dtype()).add_scalar(-1.0).scale(-HIDDEN));
        through(&self.layer, x, self.recompute, |block, x| block.forward(x, mask.as_ref()))
    }

    /// The pooled vector of each row, from [`Bert::hidden`]: `[b, t, d]` to `[b, d]`.
    ///
    /// # Panics
    /// Unwinds with `Kind::Unsupported` if the model has a head of tokens instead.
    #[track_caller]
    #[must_use]
    pub fn pooled(&self, hidden: &Var) -> Var {
        let Some(pooler) = &self.pooler else { lacks("pooler", "BertModel").raise() };
        pooler.forward(&hidden.select(1, 0)).tanh()
    }

    /// Scores of the token at each place: `[b, t]` (i64) to `[b, t, vocab_size]`; mask and types as for [`Bert::hidden`].
    ///
    /// # Panics
    /// As [`Bert::hidden`]; unwinds with `Kind::Unsupported` if the model has no head of tokens.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, ids: &Var, mask: Option<&Var>, types: Option<&Var>) -> Var {
        self.scores(&self.hidden(ids, mask, types))
    }

    #[track_caller]
    fn scores(&self, hidden: &Var) -> Var {
        let Some(head) = &self.head else { lacks("head of tokens", "BertForMaskedLM").raise() };
        let x = head.norm.forward(&head.dense.forward(hidden).gelu_exact());
        let table = head.decoder.as_ref().unwrap_or(&self.embeddings.word_embeddings);
        table.scores(&x).add(&head.bias.on(&x))
    }

    /// Mean cross-entropy over the places where a token is asked for: labels `[b, t]` (i64), [`Bert::IGNORED`] where none is;
    /// mask and types as for [`Bert::hidden`]. A scalar in the accumulator type.
    ///
    /// # Panics
    /// As [`Bert::forward`], and if a label is outside of the vocabulary.
    #[track_caller]
    #[must_use]
    pub fn loss(&self, ids: &Var, labels: &Var, mask: Option<&Var>, types: Option<&Var>) -> Var {
        MASKED.mean(&self.forward(ids, mask, types), labels)
    }

    /// The sum of the losses whose mean [`Bert::loss`] is. Divided by a count that covers a whole step, it is a loss that may be
    /// averaged over microbatches, whose labels are not equally many.
    ///
    /// # Panics
    /// As [`Bert::loss`].
    #[track_caller]
    #[must_use]
    pub fn loss_sum(&self, ids: &Var, labels: &Var, mask: Option<&Var>, types: Option<&Var>) -> Var {
        MASKED.rows(&self.forward(ids, mask, types), labels).sum()
    }
}

/// The loss of the places where a token is asked for.
const MASKED: CrossEntropy = CrossEntropy { ignored: Some(Bert::IGNORED), smoothing: 0.0 };

#[track_caller]
fn lacks(what: &str, architecture: &str) -> Error {
    Error::new(Kind::Unsupported, format!("this encoder has no {what}"))
        .detail("help", format!("use a folder whose config.json names the architecture {architecture}"))
        .at(std::panic::Location::caller())
}

/// What parts of names are called in files: names here begin with the first, names there with the second.
const IN_BLOCKS: [(&str, &str); 5] = [
    ("attention.dense.", "attention.output.dense."),
    ("attention.", "attention.self."),
    ("attention_norm.", "attention.output.LayerNorm."),
    ("intermediate.", "intermediate.dense."),
    ("output.", "output.dense."),
];

impl Family for Bert {
    fn describe(&self) -> ModelConfig {
        ModelConfig::Bert(self.config.clone())
    }

    fn name_in_files(&self, name: &str) -> String {
        if let Some(rest) = name.strip_prefix("head.") {
            let bias = if self.config.tie_word_embeddings { "bias" } else { "decoder.bias" };
            return match rest.split_once('.') {
                Some(("dense", end)) => format!("cls.predictions.transform.dense.{end}"),
                Some(("norm", end)) => format!("cls.predictions.transform.LayerNorm.{end}"),
                Some(_) => format!("cls.predictions.{rest}"),
                None => format!("cls.predictions.{bias}"),
            };
        }
        // A model with a head keeps the encoder under a name.
        let prefix = if self.head.is_some() { "bert." } else { "" };
        let block = name.strip_prefix("layer.").and_then(|rest| rest.split_once('.'));
        if let Some((i, rest)) = block {
            let found = IN_BLOCKS.iter().find_map(|(from, to)| Some((to, rest.strip_prefix(from)?)));
            let rest = match found {
                Some((to, end)) => format!("{to}{end}"),
                None => rest.replacen("norm.", "output.LayerNorm.", 1),
            };
            return format!("{prefix}encoder.layer.{i}.{rest}");
        }
        let name = name.replacen(".norm.", ".LayerNorm.", 1).replacen("pooler.", "pooler.dense.", 1);
        format!("{prefix}{name}")
    }

    /// The first files name weight and bias of a norm after the symbols of its paper.
    fn older_name_in_files(&self, name: &str) -> Option<String> {
        let name = self.name_in_files(name);
        let of_norm = |new: &str, old: &str| Some(format!("{}LayerNorm.{old}", name.strip_suffix(new)?));
        of_norm("LayerNorm.weight", "gamma").or_else(|| of_norm("LayerNorm.bias", "beta"))
    }

    /// Buffers that old files hold beside the weights, the head that judges pairs of sentences, and what a tied head holds
    /// twice; an untied one has its bias beside its weight.
    fn passed_over(&self) -> &'static [&'static str] {
        match (&self.head, self.config.tie_word_embeddings) {
            (None, _) => &["*.position_ids", "cls.*"],
            (Some(_), true) => {
                &["*.position_ids", "bert.pooler.*", "cls.seq_relationship.*", "cls.predictions.decoder.*"]
            }
            (Some(_), false) => {
                &["*.position_ids", "bert.pooler.*", "cls.seq_relationship.*", "cls.predictions.bias"]
            }
        }
    }
}
