//! A text on its way through a model: token by token, each at the cost of one.

use crate::cache::Cache;
use crate::model::{Family, LanguageModel};
use crate::placed::Model;
use shardgrad_tensor::{Error, Kind, Result, Tensor, Value};

/// A model that reads a text and says what may follow. Every rank reads the same text and gets the same numbers.
///
/// A text may become longer than the model has positions. Whenever they are used up, all but the last half of them are
/// forgotten and that half is read again, so that a token still costs little more than one on average.
#[derive(Debug)]
pub struct Reading<'a> {
    model: &'a Model<LanguageModel>,
    cache: Cache,
    /// What the cache holds.
    seen: Vec<i64>,
}

impl<'a> Reading<'a> {
    /// Nothing read yet.
    #[must_use]
    pub fn new(model: &'a Model<LanguageModel>) -> Reading<'a> {
        Reading { model, cache: model.cache(), seen: Vec::new() }
    }

    /// Reads on; gives the logits of the token that follows, `[vocab_size]`. Of more tokens than the model has positions only
    /// the last ones are read.
    ///
    /// # Errors
    /// `Kind::Shape` for no token at all; `Kind::OutOfMemory`.
    ///
    /// # Panics
    /// Unwinds with an error if a token is outside of the vocabulary.
    #[track_caller]
    pub fn read(&mut self, tokens: &[i64]) -> Result<Vec<f64>> {
        if tokens.is_empty() {
            return Err(Error::new(Kind::Shape, "no token to read")
                .detail("help", "a model says what follows a text of at least one token"));
        }
        let positions = self.model.describe().positions();
        let mut new = tokens.to_vec();
        if self.seen.len() + new.len() > positions {
            // A text that alone exceeds the positions fills them all; one that grew beyond them leaves room.
            let kept = if tokens.len() > positions { positions } else { (positions / 2).max(tokens.len()) };
            let mut text = std::mem::take(&mut self.seen);
            text.append(&mut new);
            new = text.split_off(text.len() - kept.min(text.len()));
            self.cache = self.model.cache();
        }
        let ids = Tensor::from_host(self.model.rank(), &[1, new.len()], &new)?;
        let logits = self.model.next(&self.model.inference().constant(ids), &mut self.cache);
        self.seen.append(&mut new);
        logits.tensor().to_f64()
    }

    /// The tokens that the next one is judged by.
    #[must_use]
    pub fn seen(&self) -> &[i64] {
        &self.seen
    }
}
