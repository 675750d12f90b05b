//! BERT: a post-norm encoder with learned position embeddings. Devlin et al., arXiv 1810.04805.

use super::blocks::{check_ids, run_blocks};
use crate::checkpoint::hf::{BertConfig, BertHead, HfModel, ModelConfig};
use crate::layer::{
    DocumentPoints, Dropout, Embedding, EncoderAttention, LayerNorm, Linear, PackedDocuments,
};
use crate::loss::{CrossEntropy, IGNORE_INDEX, Loss};
use crate::module;
use crate::module::activation_point::ActivationPoint;
use crate::module::param::{Init, Param};
use crate::plan::Plan;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Elementwise, Error, Kind, Value};

/// The mask value added to the scores of padding keys. Its exponential is zero relative to that of any other score, and every
/// float dtype can represent it.
const MASKED_SCORE: f64 = -3e4;

module! {
    /// BERT embeddings: the sum of token, position and token type embeddings, and a norm.
    #[derive(Debug)]
    pub struct BertEmbeddings {
        /// Token embedding, `[vocab_size, hidden_size]`.
        pub word_embeddings: Embedding,
        /// Position embedding, `[max_position_embeddings, hidden_size]`.
        pub position_embeddings: Embedding,
        /// Token type embedding, `[type_vocab_size, hidden_size]`.
        pub token_type_embeddings: Embedding,
        /// The norm of the sum.
        pub norm: LayerNorm,
        drop: Dropout,
    }
}

module! {
    /// BERT block: attention_norm(x + attention(x)), then norm(x + output(gelu(intermediate(x)))), with dropout before each addition.
    #[doc(alias = "BertLayer")]
    #[derive(Debug)]
    pub struct BertBlock {
        /// Attention.
        pub attention: EncoderAttention,
        attention_drop: Dropout,
        /// The norm after attention.
        pub attention_norm: LayerNorm,
        /// First linear layer of the MLP, `[d]` to its hidden units.
        pub intermediate: Linear,
        /// Second linear layer of the MLP, hidden units to `[d]`.
        pub output: Linear,
        output_drop: Dropout,
        /// The norm after the MLP.
        pub norm: LayerNorm,
    }
}

module! {
    /// Masked language modeling head: a linear layer, GELU, a norm, and an output layer, tied to the token embedding or untied.
    #[doc(alias = "BertLMPredictionHead")]
    #[derive(Debug)]
    pub struct MlmHead {
        /// Linear layer, `[d]` to `[d]`.
        pub dense: Linear,
        /// The norm after GELU.
        pub norm: LayerNorm,
        /// The output layer if it is not tied to the token embedding: `[vocab_size, hidden_size]`.
        pub decoder: Option<Embedding>,
        /// The bias of the output layer, `[vocab_size]`.
        pub bias: Param,
    }
}

module! {
    /// BERT: embeddings, blocks, and a pooler or a masked language modeling head.
    ///
    /// Activation point: `mask`, the padding mask `[b, t]` of all blocks.
    #[doc(alias = "BertModel")]
    #[doc(alias = "BertForMaskedLM")]
    #[derive(Debug)]
    pub struct Bert {
        /// The embeddings.
        pub embeddings: BertEmbeddings,
        /// The blocks.
        pub layer: Vec<BertBlock>,
        /// The pooler of the first token: a linear layer `[d]` to `[d]`, then tanh.
        pub pooler: Option<Linear>,
        /// The masked language modeling head.
        pub head: Option<MlmHead>,
        mask: ActivationPoint,
        documents: DocumentPoints;
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
        let linear = |from, to| Linear::new(from, to).with_transposed_file_shape().init(std);
        BertBlock {
            attention: EncoderAttention::new(d, config.num_attention_heads)
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

    /// Applies the block: `[b, t, d]` to `[b, t, d]`, with a mask as [`EncoderAttention::forward`] takes it.
    ///
    /// # Panics
    /// Unwinds with an error if x has another shape.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var, mask: Option<&Var>) -> Var {
        self.feed_forward(&self.attention.forward_with_residual(x, mask, self.attention_drop.then_add(x)))
    }

    /// [`BertBlock::forward`] within packed documents.
    ///
    /// # Panics
    /// As [`EncoderAttention::forward_packed`].
    #[track_caller]
    #[must_use]
    pub fn forward_packed(&self, x: &Var, documents: &PackedDocuments) -> Var {
        let residual = Some(self.attention_drop.then_add(x));
        self.feed_forward(&self.attention.forward_packed(x, documents, residual))
    }

    /// The block after the attention and its residual.
    #[track_caller]
    fn feed_forward(&self, attended: &Var) -> Var {
        let x = self.attention_norm.forward(attended);
        let hidden = self.intermediate.forward(&x).gelu_exact();
        let fed = self.output.forward_with_residual(&hidden, self.output_drop.then_add(&x));
        self.norm.forward(&fed)
    }
}

impl Bert {
    /// The label of positions that the loss ignores.
    pub const IGNORE_INDEX: i64 = IGNORE_INDEX;

    /// A model of this config. Weights are initialized from a normal distribution with standard deviation `initializer_range`, biases
    /// with zeros, norms with ones.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if the width is not a multiple of the heads, or a dropout probability is not in `0..1`.
    #[track_caller]
    #[must_use]
    pub fn new(config: &BertConfig) -> Bert {
        let (d, std) = (config.hidden_size, Init::Normal(config.initializer_range));
        let table = |rows| Embedding::new(rows, d).init(std);
        let norm = || LayerNorm::new(d).eps(config.layer_norm_eps);
        let square = || Linear::new(d, d).with_transposed_file_shape().init(std);
        let head = || MlmHead {
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
            head: (config.head == BertHead::MaskedLm).then(head),
            mask: ActivationPoint::default(),
            documents: DocumentPoints::default(),
            config: config.clone(),
            recompute: false,
        }
    }

    /// Returns the same model with activation checkpointing: only the inputs of blocks are saved for the backward pass, which computes
    /// the rest again.
    #[doc(alias = "checkpoint")]
    #[doc(alias = "remat")]
    #[doc(alias = "activation checkpointing")]
    #[doc(alias = "gradient_checkpointing_enable")]
    #[must_use]
    pub fn recompute(self, recompute: bool) -> Bert {
        Bert { recompute, ..self }
    }

    /// The parallelism plan of this family: rows and tokens of the batch; heads, hidden units and vocabulary.
    #[must_use]
    pub fn plan(_: &BertConfig) -> Plan {
        Plan::bert()
    }

    /// The config of the model.
    #[must_use]
    pub fn config(&self) -> &BertConfig {
        &self.config
    }

    /// Returns the last hidden state of each token: `[b, t]` (i64) to `[b, t, d]`. `mask` is 1 for tokens and 0 for padding (i64,
    /// `[b, t]`; `None` for no padding); `types` are the token types (i64, `[b, t]`; `None` for all 0). Hidden states of padding are
    /// meaningless.
    ///
    /// # Panics
    /// Unwinds with `Kind::Shape` if the ids have other dims, or `t` exceeds `max_position_embeddings`.
    #[doc(alias = "last_hidden_state")]
    #[doc(alias = "attention_mask")]
    #[track_caller]
    #[must_use]
    pub fn hidden_states(&self, ids: &Var, mask: Option<&Var>, types: Option<&Var>) -> Var {
        check_ids(ids, 0, self.config.max_position_embeddings);
        self.encode_checked(ids, mask, types)
    }

    /// [`Bert::hidden_states`] of ids whose shape was checked. Not `track_caller`: errors point to the model's code, not to its caller.
    fn encode_checked(&self, ids: &Var, mask: Option<&Var>, types: Option<&Var>) -> Var {
        let positions = self.embeddings.position_embeddings.first_rows(ids, ids.shape()[1]);
        let x = self.embed(ids, &positions, types);
        let mask =
            mask.map(|mask| self.mask.constrain(mask).cast(x.dtype()).add_scalar(-1.0).scale(-MASKED_SCORE));
        run_blocks(&self.layer, x, self.recompute, |block, x| block.forward(x, mask.as_ref()))
    }

    /// [`Bert::hidden_states`] of rows of packed documents without padding: tokens attend within their documents, and position embeddings are
    /// those of their positions there.
    ///
    /// # Panics
    /// Unwinds with `Kind::Shape` if the ids have other dims than `[b, t]`, and with an error if a position is not below
    /// `max_position_embeddings`.
    #[doc(alias = "position_ids")]
    #[track_caller]
    #[must_use]
    pub fn hidden_states_packed(&self, ids: &Var, types: Option<&Var>, documents: &PackedDocuments) -> Var {
        check_ids(ids, 0, usize::MAX);
        let positions = self.embeddings.position_embeddings.forward(&documents.positions);
        let x = self.embed(ids, &positions, types);
        let documents = self.documents.constrain(documents);
        run_blocks(&self.layer, x, self.recompute, |block, x| block.forward_packed(x, &documents))
    }

    /// The sum of the embeddings of tokens, of their positions and of their types (`None` for all 0), normed.
    fn embed(&self, ids: &Var, positions: &Var, types: Option<&Var>) -> Var {
        let BertEmbeddings { word_embeddings, token_type_embeddings, norm, drop, .. } = &self.embeddings;
        let words = word_embeddings.forward(ids);
        let typed = match types {
            Some(types) => words.add(&token_type_embeddings.forward(types)),
            None => words.add(&token_type_embeddings.first_rows(ids, 1).reshape(&[self.config.hidden_size])),
        };
        drop.forward(&norm.forward(&typed.add(positions)))
    }

    /// Returns the pooled vector of each row from [`Bert::hidden_states`]: `[b, t, d]` to `[b, d]`.
    ///
    /// # Panics
    /// Unwinds with `Kind::Unsupported` if the model has a masked language modeling head instead of a pooler.
    #[doc(alias = "pooler_output")]
    #[track_caller]
    #[must_use]
    pub fn pool(&self, hidden: &Var) -> Var {
        let Some(pooler) = &self.pooler else { lacks("pooler", "BertModel").raise() };
        pooler.forward(&hidden.select(1, 0)).tanh()
    }

    /// Returns the logits of the token at each position: `[b, t]` (i64) to `[b, t, vocab_size]`; mask and types as for
    /// [`Bert::hidden_states`].
    ///
    /// # Panics
    /// As [`Bert::hidden_states`]; unwinds with `Kind::Unsupported` if the model has no masked language modeling head.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, ids: &Var, mask: Option<&Var>, types: Option<&Var>) -> Var {
        self.lm_logits(&self.hidden_states(ids, mask, types))
    }

    /// [`Bert::forward`] of rows of packed documents, as for [`Bert::hidden_states_packed`].
    ///
    /// # Panics
    /// As [`Bert::hidden_states_packed`]; unwinds with `Kind::Unsupported` if the model has no masked language modeling head.
    #[track_caller]
    #[must_use]
    pub fn forward_packed(&self, ids: &Var, types: Option<&Var>, documents: &PackedDocuments) -> Var {
        self.lm_logits(&self.hidden_states_packed(ids, types, documents))
    }

    #[track_caller]
    fn lm_logits(&self, hidden: &Var) -> Var {
        let Some(head) = &self.head else {
            lacks("masked language modeling head", "BertForMaskedLM").raise()
        };
        let x = head.norm.forward(&head.dense.forward(hidden).gelu_exact());
        let table = head.decoder.as_ref().unwrap_or(&self.embeddings.word_embeddings);
        table.logits(&x).add(&head.bias.on(&x))
    }

    /// Mean cross-entropy over the masked positions: labels `[b, t]` (i64), [`Bert::IGNORE_INDEX`] at all other positions; mask and
    /// types as for [`Bert::hidden_states`]. A scalar in the accumulator type.
    ///
    /// # Panics
    /// As [`Bert::forward`], and if a label is outside the vocabulary.
    #[track_caller]
    #[must_use]
    pub fn loss(&self, ids: &Var, labels: &Var, mask: Option<&Var>, types: Option<&Var>) -> Var {
        self.masked_loss(ids, labels, mask, types).value()
    }

    /// [`Bert::loss`] as the loss of a step: a sum with the number of masked positions, so that microbatches and ranks may have different
    /// numbers of them.
    ///
    /// # Panics
    /// As [`Bert::loss`].
    #[track_caller]
    #[must_use]
    pub fn masked_loss(&self, ids: &Var, labels: &Var, mask: Option<&Var>, types: Option<&Var>) -> Loss {
        CrossEntropy::MASKED.loss(&self.forward(ids, mask, types), labels)
    }

    /// [`Bert::masked_loss`] of rows of packed documents, as for [`Bert::hidden_states_packed`].
    ///
    /// # Panics
    /// As [`Bert::forward_packed`], and if a label is outside the vocabulary.
    #[track_caller]
    #[must_use]
    pub fn masked_loss_packed(
        &self,
        ids: &Var,
        labels: &Var,
        types: Option<&Var>,
        documents: &PackedDocuments,
    ) -> Loss {
        CrossEntropy::MASKED.loss(&self.forward_packed(ids, types, documents), labels)
    }
}

#[track_caller]
fn lacks(what: &str, architecture: &str) -> Error {
    Error::new(Kind::Unsupported, format!("this BERT model has no {what}"))
        .detail("help", format!("use a model folder whose config.json names the architecture {architecture}"))
        .at(std::panic::Location::caller())
}

/// Prefixes of parameter names within a block, and the prefixes that replace them in files.
const IN_BLOCKS: [(&str, &str); 5] = [
    ("attention.dense.", "attention.output.dense."),
    ("attention.", "attention.self."),
    ("attention_norm.", "attention.output.LayerNorm."),
    ("intermediate.", "intermediate.dense."),
    ("output.", "output.dense."),
];

impl HfModel for Bert {
    fn model_config(&self) -> ModelConfig {
        ModelConfig::Bert(self.config.clone())
    }

    fn hf_name(&self, name: &str) -> String {
        if let Some(rest) = name.strip_prefix("head.") {
            let bias = if self.config.tie_word_embeddings { "bias" } else { "decoder.bias" };
            return match rest.split_once('.') {
                Some(("dense", end)) => format!("cls.predictions.transform.dense.{end}"),
                Some(("norm", end)) => format!("cls.predictions.transform.LayerNorm.{end}"),
                Some(_) => format!("cls.predictions.{rest}"),
                None => format!("cls.predictions.{bias}"),
            };
        }
        // In files of a model with a head, the encoder has a prefix.
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

    /// The oldest files name weight and bias of a norm `gamma` and `beta`.
    fn legacy_hf_name(&self, name: &str) -> Option<String> {
        let name = self.hf_name(name);
        let of_norm = |new: &str, old: &str| Some(format!("{}LayerNorm.{old}", name.strip_suffix(new)?));
        of_norm("LayerNorm.weight", "gamma").or_else(|| of_norm("LayerNorm.bias", "beta"))
    }

    /// Ignores the buffers in old files, the next sentence prediction head, and duplicates: of the tied decoder weight, or of the bias,
    /// which an untied head stores next to its weight.
    fn ignored_on_load(&self) -> &'static [&'static str] {
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
