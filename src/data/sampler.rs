//! The sampler: the rows of a step are a pure function of the seed and the global row number.

use super::batch::Batch;
use super::content_hash::ContentHash;
use super::corpus::{Corpus, Split};
use super::token_file::TokenFile;
use super::token_order::TokenOrder;
use shardgrad::Result;
use shardgrad::kernels::op::random::philox;
use shardgrad::nn::checkpoint::Digest;
use std::ops::Range;
use std::sync::Arc;

/// Random stream of the data order.
const STREAM: u64 = u64::from_be_bytes(*b"\0\0\0\0data");

/// Maximum number of windows in a fingerprint.
const FINGERPRINT_WINDOWS: u64 = 4096;

/// The order of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// Uniform sampling with replacement: any window of a text, any row of a token file.
    Shuffled {
        /// The seed of the run.
        seed: u64,
    },
    /// Consecutive windows without overlap (or rows of the file), repeated at the end.
    Sequential,
}

#[derive(Clone, Debug)]
enum Source {
    Text { corpus: Arc<Corpus>, split: Split, seq: usize },
    Tokens(Arc<TokenFile>),
}

/// Reads rows by their global number. Cheap to clone; ranks that are threads share the data.
///
/// Row r of step s has the global number `s * batch + r`, on any mesh and for any number of microbatches.
#[derive(Clone, Debug)]
pub(crate) struct Sampler {
    source: Source,
    order: RowOrder,
    token_order: TokenOrder,
}

impl Sampler {
    /// Samples rows of `seq` tokens from a split of a text.
    ///
    /// # Errors
    /// `Kind::Data` if the split is too short for one row ([`Corpus::check_length`]).
    pub(crate) fn of_text(corpus: Arc<Corpus>, split: Split, seq: usize, order: RowOrder) -> Result<Sampler> {
        corpus.check_length(split, seq)?;
        Ok(Sampler {
            source: Source::Text { corpus, split, seq },
            order,
            token_order: TokenOrder::Sequential,
        })
    }

    /// Samples the rows of a token file.
    #[must_use]
    pub(crate) fn of_tokens(file: Arc<TokenFile>, order: RowOrder) -> Sampler {
        Sampler { source: Source::Tokens(file), order, token_order: TokenOrder::Sequential }
    }

    /// Returns the same sampler with the tokens of each row in another order.
    #[must_use]
    pub(crate) fn with_token_order(self, token_order: TokenOrder) -> Sampler {
        Sampler { token_order, ..self }
    }

    /// Returns the global row numbers of a step (counted from 0) with `batch` rows per step.
    #[must_use]
    pub(crate) fn rows_of_step(step: u64, batch: u64) -> Range<u64> {
        step * batch..(step + 1) * batch
    }

    /// Returns the sequence length.
    #[must_use]
    pub(crate) fn seq(&self) -> usize {
        match &self.source {
            Source::Text { seq, .. } => *seq,
            Source::Tokens(file) => file.seq(),
        }
    }

    /// Returns the number of non-overlapping windows, or of rows in the file: one epoch of [`RowOrder::Sequential`]. An incomplete last window is
    /// dropped.
    #[must_use]
    pub(crate) fn num_windows(&self) -> u64 {
        match &self.source {
            Source::Text { corpus, split, seq } => (corpus.len(*split) - 1) / *seq as u64,
            Source::Tokens(file) => file.num_rows(),
        }
    }

    /// Returns the position of the first token of a row in the split, or its row number in the file.
    #[must_use]
    pub(crate) fn start(&self, row: u64) -> u64 {
        match (&self.source, self.order) {
            (Source::Text { seq, .. }, RowOrder::Sequential) => row % self.num_windows() * *seq as u64,
            (Source::Text { corpus, split, seq }, RowOrder::Shuffled { seed }) => {
                uniform_below(corpus.len(*split) - *seq as u64, seed, row)
            }
            (Source::Tokens(file), RowOrder::Sequential) => row % file.num_rows(),
            (Source::Tokens(file), RowOrder::Shuffled { seed }) => uniform_below(file.num_rows(), seed, row),
        }
    }

    /// Returns the number of targets of some rows if they have labels; `None` if every token is a target.
    ///
    /// # Errors
    /// As [`Sampler::batch`].
    pub(crate) fn num_targets(&self, rows: Range<u64>) -> Result<Option<u64>> {
        match &self.source {
            Source::Tokens(file) if file.is_labelled() => {
                rows.map(|row| file.num_targets(self.start(row))).sum::<Result<u64>>().map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Reads rows by their global numbers: those of a step, or the local ones of a rank.
    ///
    /// # Errors
    /// `Kind::Data` or `Kind::Io` if a file has changed, holds an id outside the vocabulary, or cannot be read.
    pub(crate) fn batch(&self, rows: Range<u64>) -> Result<Batch> {
        let mut batch = Batch::default();
        if let Source::Tokens(file) = &self.source {
            // A rank without rows has the same columns as the others.
            batch.extra.resize_with(file.num_extra(), Vec::new);
        }
        let mut row_tokens = Vec::new();
        for row in rows {
            let start = self.start(row);
            row_tokens.clear();
            match &self.source {
                Source::Text { corpus, split, seq } => {
                    corpus.read(*split, start, seq + 1, &mut row_tokens)?;
                }
                Source::Tokens(file) if file.is_labelled() => {
                    file.labelled_row(start, &mut batch)?;
                    continue;
                }
                Source::Tokens(file) => file.row(start, &mut row_tokens)?,
            }
            let seq = row_tokens.len() - 1;
            batch.inputs.extend_from_slice(&row_tokens[..seq]);
            batch.targets.extend_from_slice(&row_tokens[1..]);
        }
        self.token_order.apply(&mut batch, self.seq());
        Ok(batch)
    }

    /// Returns the hash of all data, validation split included, and of the sequence length, by which processes compare their data.
    ///
    /// # Errors
    /// As [`Sampler::batch`].
    pub(crate) fn content_hash(&self) -> Result<String> {
        let mut hash = ContentHash::default();
        hash.add(&(self.seq() as u64).to_le_bytes());
        match &self.source {
            Source::Text { corpus, .. } => corpus.add_to(&mut hash)?,
            Source::Tokens(file) => file.add_to(&mut hash)?,
        }
        Ok(hash.hex())
    }

    /// Returns a fingerprint of the data for checkpoints: of its length and up to 4096 evenly spaced windows.
    ///
    /// # Errors
    /// As [`Sampler::batch`].
    pub(crate) fn fingerprint(&self) -> Result<String> {
        let mut in_order =
            Sampler { order: RowOrder::Sequential, ..self.clone() }.with_token_order(TokenOrder::Sequential);
        if let Source::Text { split, .. } = &mut in_order.source {
            // The validation split is part of the run too.
            *split = Split::All;
        }
        let all = in_order.num_windows();
        let tokens = match &in_order.source {
            Source::Text { corpus, split, .. } => corpus.len(*split),
            Source::Tokens(file) => file.num_rows(),
        };
        let mut digest = Digest::default();
        digest.add(&tokens.to_le_bytes());
        let count = all.min(FINGERPRINT_WINDOWS);
        for i in 0..count {
            let row = (u128::from(i) * u128::from(all) / u128::from(count)) as u64;
            let Batch { inputs, targets, extra } = in_order.batch(row..row + 1)?;
            for numbers in [inputs, targets].iter().chain(&extra) {
                numbers.iter().for_each(|number| digest.add(&number.to_le_bytes()));
            }
        }
        Ok(digest.hex())
    }
}

/// Returns a random number in 0..n, uniform up to n / 2^64: the upper half of n times 64 random bits.
fn uniform_below(n: u64, seed: u64, row: u64) -> u64 {
    let words = |x: u64| [x as u32, (x >> 32) as u32];
    let ([row_low, row_high], [stream_low, stream_high]) = (words(row), words(STREAM));
    let [low, high, ..] = philox([row_low, row_high, stream_low, stream_high], words(seed));
    let bits = u64::from(high) << 32 | u64::from(low);
    ((u128::from(bits) * u128::from(n)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::super::scratch::Scratch;
    use super::super::token_file::Vocabulary;
    use super::*;
    use shardgrad::Kind;
    use shardgrad::kernels::DType;
    use shardgrad::nn::checkpoint::TensorWriter;
    use shardgrad::nn::{BertConfig, ModelConfig};

    fn corpus(n: usize) -> Arc<Corpus> {
        Arc::new(Corpus::new("t".into(), (0..n).map(|i| (i % 251) as u8).collect()))
    }

    fn shuffled(n: usize, seq: usize, seed: u64) -> Sampler {
        Sampler::of_text(corpus(n), Split::All, seq, RowOrder::Shuffled { seed }).unwrap()
    }

    fn tokens(dir: &Scratch) -> Arc<TokenFile> {
        let path = dir.path("t");
        let mut writer =
            TensorWriter::create(&path, &[("input_ids".into(), DType::I64, vec![3, 3])]).unwrap();
        let bytes: Vec<u8> = (0..9i64).flat_map(i64::to_le_bytes).collect();
        writer.append("input_ids", &bytes).unwrap();
        writer.finish().unwrap();
        Arc::new(TokenFile::open(&path, &Vocabulary::of(9)).unwrap())
    }

    #[test]
    fn row_is_a_window_and_its_next_tokens() {
        let sampler = shuffled(200, 5, 7);
        let batch = sampler.batch(0..4).unwrap();
        for row in 0..4 {
            let start = sampler.start(row as u64) as i64;
            assert_eq!(batch.inputs[row * 5..][..5], (start..start + 5).collect::<Vec<_>>());
            assert_eq!(batch.targets[row * 5..][..5], (start + 1..start + 6).collect::<Vec<_>>());
        }
        assert_eq!(sampler.batch(4..4).unwrap(), Batch::default());
    }

    #[test]
    fn rows_do_not_depend_on_microbatches() {
        let sampler = shuffled(1000, 8, 3);
        let whole = sampler.batch(Sampler::rows_of_step(5, 12)).unwrap();
        assert_eq!(Sampler::rows_of_step(5, 12), 60..72);
        for cuts in [vec![60, 66, 72], vec![60, 61, 70, 72], vec![60, 60, 72]] {
            let mut joined = Batch::default();
            for part in cuts.windows(2) {
                let part = sampler.batch(part[0]..part[1]).unwrap();
                joined.inputs.extend(part.inputs);
                joined.targets.extend(part.targets);
            }
            assert_eq!(joined, whole);
        }
        // Two steps of 6 rows are one step of 12.
        assert_eq!(sampler.batch(Sampler::rows_of_step(10, 6)).unwrap().inputs, whole.inputs[..48]);
    }

    #[test]
    fn starts_are_fixed_by_seed_and_row() {
        // From an independent implementation in Python. A change of these numbers changes every run.
        for (seed, first, far) in [
            (0, [201, 22, 268, 295, 0], 213),
            (1, [186, 715, 184, 113, 138], 167),
            (0xdead_beef_cafe_f00d, [473, 517, 140, 529, 815], 565),
        ] {
            let sampler = shuffled(1000, 10, seed);
            assert_eq!([0, 1, 2, 3, 4].map(|row| sampler.start(row)), first);
            assert_eq!(sampler.start((1 << 40) + 7), far);
        }
    }

    #[test]
    fn window_starts_are_uniform() {
        // 100 positions, 100 draws each on average: chi-squared with 99 degrees of freedom exceeds 160 once in 10^4 seeds.
        for seed in [0, 1, u64::MAX] {
            let sampler = shuffled(109, 9, seed);
            let mut counts = [0f64; 100];
            for row in 0..10_000 {
                counts[sampler.start(row) as usize] += 1.0;
            }
            let chi: f64 = counts.iter().map(|c| (c - 100.0) * (c - 100.0) / 100.0).sum();
            assert!(chi < 160.0, "{chi}");
            // The test rejects a generator with a period of 50.
            let mut poor = [0f64; 100];
            (0..10_000u64).for_each(|row| poor[sampler.start(row % 50) as usize] += 1.0);
            assert!(poor.iter().map(|c| (c - 100.0) * (c - 100.0) / 100.0).sum::<f64>() > 160.0);
        }
    }

    #[test]
    fn uniform_below_stays_below_its_bound() {
        for n in [1, 2, 3, u64::MAX] {
            for row in 0..100 {
                assert!(uniform_below(n, 1, row) < n);
            }
        }
        assert_eq!(shuffled(6, 5, 1).start(u64::MAX), 0);
    }

    #[test]
    fn windows_cover_the_held_out_split_once() {
        for n in 6..40 {
            let held_out = Arc::new(Corpus::new("t".into(), (0..n * 10).map(|i| (i % 250) as u8).collect()));
            let sampler = Sampler::of_text(held_out.clone(), Split::Val, 5, RowOrder::Sequential).unwrap();
            let val = held_out.tokens(Split::Val);
            assert_eq!(sampler.num_windows(), (n as u64 - 1) / 5);
            let batch = sampler.batch(0..sampler.num_windows()).unwrap();
            let covered = batch.inputs.len();
            assert!(covered < n && n <= covered + 5);
            let wide: Vec<i64> = val.iter().copied().map(i64::from).collect();
            assert_eq!(batch.inputs, wide[..covered]);
            assert_eq!(batch.targets, wide[1..=covered]);
            assert_eq!(sampler.start(sampler.num_windows()), 0, "wraps");
        }
    }

    #[test]
    fn token_file_rows_are_sampled() {
        let dir = Scratch::new();
        let file = tokens(&dir);
        let in_order = Sampler::of_tokens(file.clone(), RowOrder::Sequential);
        assert_eq!((in_order.seq(), in_order.num_windows()), (2, 3));
        let batch = in_order.batch(2..4).unwrap();
        assert_eq!(batch, Batch { inputs: vec![6, 7, 0, 1], targets: vec![7, 8, 1, 2], extra: Vec::new() });
        let shuffled = Sampler::of_tokens(file, RowOrder::Shuffled { seed: 0 });
        let mut seen: Vec<u64> = (0..30).map(|row| shuffled.start(row)).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, [0, 1, 2]);
    }

    #[test]
    fn fingerprint_depends_on_data_not_order() {
        let print = |sampler: Sampler| sampler.fingerprint().unwrap();
        let whole = print(shuffled(50_000, 10, 1));
        assert_eq!(
            whole,
            print(Sampler::of_text(corpus(50_000), Split::All, 10, RowOrder::Sequential).unwrap())
        );
        assert_ne!(whole, print(shuffled(50_001, 10, 1)));
        let mut bytes: Vec<u8> = (0..50_000).map(|i| (i % 251) as u8).collect();
        // The last window of the fingerprint, of more windows than it covers.
        let last = (4095 * 4999 / 4096 * 10 + 3) as usize;
        bytes[last] ^= 1;
        let other = Arc::new(Corpus::new("t".into(), bytes));
        assert_ne!(whole, print(Sampler::of_text(other, Split::All, 10, RowOrder::Sequential).unwrap()));
    }

    #[test]
    fn content_hash_covers_every_token_not_order() {
        let hash = |bytes: &[u8], split| {
            let corpus = Arc::new(Corpus::new("t".into(), bytes.to_vec()));
            let sampler = Sampler::of_text(corpus, split, 10, RowOrder::Shuffled { seed: 1 }).unwrap();
            sampler.content_hash().unwrap()
        };
        let bytes: Vec<u8> = (0..50_000).map(|i| (i % 251) as u8).collect();
        let whole = hash(&bytes, Split::Train);
        assert_eq!(whole, hash(&bytes, Split::Val));
        for at in [0, 4321, 49_999] {
            let mut other = bytes.clone();
            other[at] ^= 1;
            assert_ne!(whole, hash(&other, Split::Train), "{at}");
        }
        let dir = Scratch::new();
        let of_tokens = Sampler::of_tokens(tokens(&dir), RowOrder::Sequential).content_hash().unwrap();
        assert_eq!(
            of_tokens,
            Sampler::of_tokens(tokens(&dir), RowOrder::Shuffled { seed: 1 }).content_hash().unwrap()
        );
        assert_ne!(of_tokens, whole);
    }

    #[test]
    fn empty_batch_has_all_columns() {
        let dir = Scratch::new();
        let read = |name: &str, columns: &[&str], vocabulary: Vocabulary| {
            let path = dir.path(name);
            let entries: Vec<_> = columns.iter().map(|c| (c.to_string(), DType::I64, vec![2, 3])).collect();
            let mut writer = TensorWriter::create(&path, &entries).unwrap();
            for column in columns {
                writer.append(column, &[1i64; 6].map(i64::to_le_bytes).concat()).unwrap();
            }
            writer.finish().unwrap();
            let file = Arc::new(TokenFile::open(&path, &vocabulary).unwrap());
            let sampler = Sampler::of_tokens(file, RowOrder::Sequential);
            [0..0, 0..1].map(|rows| sampler.batch(rows).unwrap().extra.len())
        };
        let encoder = || Vocabulary::new(&ModelConfig::Bert(BertConfig::new(9, 3, [6, 5], 2, 2)));
        assert_eq!(read("plain", &["input_ids", "labels"], encoder()), [0, 0]);
        assert_eq!(read("masked", &["input_ids", "labels", "attention_mask"], encoder()), [2, 2]);
        assert_eq!(read("typed", &["input_ids", "labels", "token_type_ids"], encoder()), [2, 2]);
        assert_eq!(read("causal", &["input_ids", "attention_mask"], Vocabulary::of(9)), [0, 0]);
    }

    #[test]
    fn short_text_is_refused() {
        let error = Sampler::of_text(corpus(20), Split::Val, 5, RowOrder::Sequential).unwrap_err();
        assert_eq!(error.kind(), Kind::Data);
        assert_eq!(
            error.message(),
            "t: the validation split (last 10%) has 2 bytes, but --seq 5 needs at least 6"
        );
    }
}
