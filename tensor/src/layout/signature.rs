//! Index signatures in the style of einsum: one line that states which dims of which tensors are the same index.
//!
//! `signature = tensor {"," tensor} "->" tensor {"," tensor}`; a tensor is a list of labels separated by spaces (none: a
//! scalar). `x` is a free label; `x!` must be unsharded; `..m` is an ellipsis: any number of leading labels, the same in
//! every tensor that writes `..m`; `[v]` is indexed: contracted against indices, the kernel gets the rank's range, and
//! rows outside of it are zeros; `1` is a dim of extent 1 that is never sharded. A label has one extent. A label in no
//! output is contracted, a label in no input is created.

use crate::layout::refusal::Refusal;
use shardgrad_dist::{Error, Kind, Result};
use smallvec::SmallVec;
use std::fmt;
use std::sync::Arc;

/// The kind of one term of a signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// `x`: a label.
    Free,
    /// `x!`: a label that must be unsharded.
    Unsharded,
    /// `[v]`: a label that is indexed.
    Indexed,
    /// `..m`: an ellipsis.
    Ellipsis,
    /// `1`: a dim of extent 1.
    Unit,
}

/// One term of a tensor in a signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term {
    /// The kind of the term.
    pub mark: Mark,
    symbol: u8,
}

/// A label name, numbered by first appearance.
#[derive(Debug, PartialEq, Eq)]
struct Symbol {
    name: Box<str>,
    is_ellipsis: bool,
}

/// A parsed index signature.
#[doc(alias = "einsum")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    text: Box<str>,
    symbols: Arc<[Symbol]>,
    inputs: Vec<Vec<Term>>,
    outputs: Vec<Vec<Term>>,
    /// The numbered labels for widths of the one ellipsis from 0 on (or for no width, without an ellipsis).
    numbered: Vec<Arc<Labels>>,
}

/// For this many widths of an ellipsis, labels are numbered when the signature is parsed.
const NUM_WIDTHS: usize = 6;

/// With at most this many names, no width below [`NUM_WIDTHS`] has more labels than there are numbers.
const SYMBOLS_MAX: u8 = Labels::UNIT - NUM_WIDTHS as u8;

impl Signature {
    /// Parses a signature such as `..m d!, d! -> ..m d!`.
    ///
    /// # Errors
    /// `Kind::Shape` for a word that is not a term, a label that appears twice in one tensor, an ellipsis that is
    /// not first, and names that an ellipsis would generate as well (`m0` for `..m`).
    pub fn parse(text: &str) -> Result<Signature> {
        let mut signature = Signature::read(text)?;
        let num_ellipses = signature.symbols.iter().filter(|s| s.is_ellipsis).count();
        let num_ready = [1, NUM_WIDTHS].into_iter().nth(num_ellipses).unwrap_or(0);
        let numbered = (0..num_ready).map(|width| signature.number(|_| width)).collect::<Result<_, _>>();
        signature.numbered = numbered.map_err(|e| refuse(text, &e.message))?;
        Ok(signature)
    }

    /// [`Signature::parse`] without numbering labels, for callers that only need the terms.
    pub(crate) fn read(text: &str) -> Result<Signature> {
        let (left, right) = text.split_once("->").ok_or_else(|| refuse(text, "`->` is missing"))?;
        let mut symbols = Vec::new();
        let mut side = |side: &str| {
            let tensors = side.split(',').map(|t| terms(t, &mut symbols));
            tensors.collect::<Result<Vec<_>, String>>().map_err(|why| refuse(text, &why))
        };
        let (inputs, outputs) = (side(left)?, side(right)?);
        for ellipsis in symbols.iter().filter(|s| s.is_ellipsis) {
            let produced = |s: &&Symbol| ellipsis_index(&s.name, &ellipsis.name).is_some();
            if let Some(same) = symbols.iter().find(produced) {
                let why = format!("`..{}` expands to labels like `{}`", ellipsis.name, same.name);
                return Err(refuse(text, &why));
            }
        }
        Ok(Signature { text: text.into(), symbols: symbols.into(), inputs, outputs, numbered: Vec::new() })
    }

    /// Numbers the labels, given the width of each ellipsis.
    fn number(&self, width: impl Fn(usize) -> usize) -> Result<Arc<Labels>, Refusal> {
        let mut starts = vec![0];
        let mut next = 0;
        for (s, symbol) in self.symbols.iter().enumerate() {
            next += if symbol.is_ellipsis { width(s) } else { 1 };
            if next > usize::from(Labels::UNIT) {
                return Err(Refusal::new(
                    "shape",
                    format!("`{self}` has more than {} labels", Labels::UNIT),
                    &[],
                ));
            }
            starts.push(next as u8);
        }
        let mut labels =
            Labels { symbols: self.symbols.clone(), starts, inputs: Vec::new(), outputs: Vec::new() };
        labels.inputs = self.inputs.iter().map(|t| labels.of(t)).collect();
        labels.outputs = self.outputs.iter().map(|t| labels.of(t)).collect();
        Ok(Arc::new(labels))
    }

    /// Returns the text that was parsed.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Returns the number of arguments.
    #[must_use]
    pub fn num_inputs(&self) -> usize {
        self.inputs.len()
    }

    /// Returns the number of outputs.
    #[must_use]
    pub fn num_outputs(&self) -> usize {
        self.outputs.len()
    }

    /// Returns the terms of each argument.
    #[must_use]
    pub fn inputs(&self) -> &[Vec<Term>] {
        &self.inputs
    }

    /// Returns the terms of each output.
    #[must_use]
    pub fn outputs(&self) -> &[Vec<Term>] {
        &self.outputs
    }

    /// Returns the name of a term without its mark: `m` for `..m`, `v` for `[v]`, `1` for `1`.
    #[must_use]
    pub fn name(&self, term: Term) -> &str {
        if term.mark == Mark::Unit { "1" } else { &self.symbols[term.symbol as usize].name }
    }

    /// Iterates over the labels by first appearance; an ellipsis is written as `..m`.
    pub fn labels(&self) -> impl Iterator<Item = String> {
        self.symbols.iter().map(|s| format!("{}{}", if s.is_ellipsis { ".." } else { "" }, s.name))
    }

    /// Numbers every label, given the number of dims of each argument and, for an ellipsis that no argument has, of
    /// the outputs where known.
    ///
    /// # Errors
    /// Code `shape` where a tensor has too many or too few dims.
    pub fn bind(
        &self,
        inputs: impl Fn(usize) -> usize,
        outputs: impl Fn(usize) -> Option<usize>,
    ) -> Result<Arc<Labels>, Refusal> {
        let mut widths: SmallVec<[(u8, usize); 2]> = SmallVec::new();
        for (i, terms) in self.inputs.iter().enumerate() {
            self.solve_width(terms, inputs(i), &mut widths, || format!("argument {i}"), &[(i, 0)])?;
        }
        for (k, terms) in self.outputs.iter().enumerate() {
            if let Some(ndim) = outputs(k) {
                self.solve_width(terms, ndim, &mut widths, || format!("the wanted output {k}"), &[])?;
            }
        }
        let known =
            |s: usize| widths.iter().find(|(known, _)| usize::from(*known) == s).map(|(_, width)| *width);
        let ellipsis = self.symbols.iter().enumerate().filter(|(_, symbol)| symbol.is_ellipsis);
        if let Some((_, symbol)) = ellipsis.clone().find(|(s, _)| known(*s).is_none()) {
            let text = format!("no layout gives the number of dims of `..{}`", symbol.name);
            return Err(Refusal::new("shape", text, &[]));
        }
        let width = widths.first().map_or(0, |(_, width)| *width);
        match self.numbered.get(width) {
            Some(labels) => Ok(labels.clone()),
            None => self.number(|s| known(s).unwrap_or_default()),
        }
    }

    /// Finds the width of the ellipsis of a tensor, or checks the known width.
    fn solve_width(
        &self,
        terms: &[Term],
        ndim: usize,
        widths: &mut SmallVec<[(u8, usize); 2]>,
        whose: impl Fn() -> String,
        positions: &[(usize, usize)],
    ) -> Result<(), Refusal> {
        let ellipsis = terms.first().filter(|t| t.mark == Mark::Ellipsis);
        let fixed = terms.len() - usize::from(ellipsis.is_some());
        let known =
            ellipsis.and_then(|t| widths.iter().find(|(s, _)| *s == t.symbol)).map(|(_, width)| *width);
        match (ellipsis, known) {
            (None, _) if ndim == fixed => return Ok(()),
            (Some(_), Some(width)) if ndim == fixed + width => return Ok(()),
            (Some(term), None) if ndim >= fixed => {
                widths.push((term.symbol, ndim - fixed));
                return Ok(());
            }
            _ => {}
        }
        let wanted = match (ellipsis, known) {
            (Some(_), None) => format!("at least {fixed}"),
            (_, width) => (fixed + width.unwrap_or(0)).to_string(),
        };
        let terms = self.format_terms(terms);
        let text = format!("{} has ndim {ndim}, but `{terms}` needs {wanted}", whose());
        Err(Refusal::new("shape", text, positions))
    }

    fn format_terms(&self, terms: &[Term]) -> String {
        let word = |t: &Term| {
            let name = self.name(*t);
            match t.mark {
                Mark::Free | Mark::Unit => name.to_string(),
                Mark::Unsharded => format!("{name}!"),
                Mark::Indexed => format!("[{name}]"),
                Mark::Ellipsis => format!("..{name}"),
            }
        };
        terms.iter().map(word).collect::<Vec<_>>().join(" ")
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The numbers of all labels of a signature for given numbers of dims. Labels are numbered by first appearance; `..m`
/// counts as `m0 m1 ..`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labels {
    symbols: Arc<[Symbol]>,
    /// The first label of each symbol, and the total number of labels at the end.
    starts: Vec<u8>,
    inputs: Vec<Vec<u8>>,
    outputs: Vec<Vec<u8>>,
}

impl Labels {
    /// The number that stands for a `1` dim, which has no label.
    pub const UNIT: u8 = u8::MAX;

    /// Returns the number of labels.
    #[must_use]
    pub fn count(&self) -> usize {
        *self.starts.last().expect("there is one entry more than symbols") as usize
    }

    /// Returns, for each argument and dim, the number of its label, or [`Labels::UNIT`].
    #[must_use]
    pub fn inputs(&self) -> &[Vec<u8>] {
        &self.inputs
    }

    /// Returns, for each output and dim, the number of its label, or [`Labels::UNIT`].
    #[must_use]
    pub fn outputs(&self) -> &[Vec<u8>] {
        &self.outputs
    }

    fn of(&self, terms: &[Term]) -> Vec<u8> {
        let mut labels = Vec::new();
        for term in terms {
            match term.mark {
                Mark::Unit => labels.push(Labels::UNIT),
                _ => labels.extend(self.numbers(term.symbol as usize)),
            }
        }
        labels
    }

    /// Iterates over the labels of a tensor that must be unsharded (`!`).
    pub(crate) fn unsharded(&self, terms: &[Term]) -> impl Iterator<Item = u8> {
        terms.iter().filter(|t| t.mark == Mark::Unsharded).map(|t| self.starts[t.symbol as usize])
    }

    fn numbers(&self, symbol: usize) -> std::ops::Range<u8> {
        self.starts[symbol]..self.starts[symbol + 1]
    }

    /// Returns the name of a label: `k`, or `m1` for the second label of `..m`.
    #[must_use]
    pub fn name(&self, label: u8) -> String {
        let symbol = (0..self.symbols.len()).find(|s| self.numbers(*s).contains(&label));
        match symbol.map(|s| (&self.symbols[s], label - self.starts[s])) {
            Some((symbol, i)) if symbol.is_ellipsis => format!("{}{i}", symbol.name),
            Some((symbol, _)) => symbol.name.to_string(),
            None => "1".into(),
        }
    }

    /// Returns the number of a label by its name.
    #[must_use]
    pub fn number(&self, name: &str) -> Option<u8> {
        self.symbols.iter().enumerate().find_map(|(s, symbol)| {
            let i = if symbol.is_ellipsis {
                ellipsis_index(name, &symbol.name)
            } else {
                (*symbol.name == *name).then_some(0)
            };
            self.numbers(s).nth(i?)
        })
    }
}

/// Returns 1 for the name `m1` of a label of the ellipsis `m`.
fn ellipsis_index(name: &str, ellipsis: &str) -> Option<usize> {
    let digits = name.strip_prefix(ellipsis)?;
    digits.parse().ok().filter(|_| digits.bytes().all(|b| b.is_ascii_digit()))
}

fn refuse(text: &str, why: &str) -> Error {
    Error::new(Kind::Shape, format!("`{text}` is not a signature: {why}"))
}

fn terms(tensor: &str, symbols: &mut Vec<Symbol>) -> Result<Vec<Term>, String> {
    let mut terms: Vec<Term> = Vec::new();
    for word in tensor.split_whitespace() {
        let (mark, name) = match (word.strip_prefix(".."), word.strip_prefix('['), word.strip_suffix('!')) {
            (Some(name), _, _) => (Mark::Ellipsis, name),
            (_, Some(rest), _) => (Mark::Indexed, rest.strip_suffix(']').unwrap_or("")),
            (_, _, Some(name)) => (Mark::Unsharded, name),
            _ if word == "1" => (Mark::Unit, word),
            _ => (Mark::Free, word),
        };
        let letters = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        if mark != Mark::Unit && !(letters && name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_'))
        {
            return Err(format!("`{word}` is not a label; write x, x!, ..x, [x] or 1"));
        }
        if mark == Mark::Ellipsis && !terms.is_empty() {
            return Err(format!("`{word}` must be the first term of its tensor"));
        }
        if mark == Mark::Unit {
            terms.push(Term { mark, symbol: 0 });
            continue;
        }
        let symbol = symbols.iter().position(|s| *s.name == *name).unwrap_or_else(|| {
            symbols.push(Symbol { name: name.into(), is_ellipsis: mark == Mark::Ellipsis });
            symbols.len() - 1
        });
        if symbols[symbol].is_ellipsis != (mark == Mark::Ellipsis) {
            return Err(format!("`{name}` and `..{name}` are both used; rename one of them"));
        }
        let symbol = u8::try_from(symbol).ok().filter(|symbol| *symbol < SYMBOLS_MAX);
        let symbol = symbol.ok_or_else(|| format!("it has more than {SYMBOLS_MAX} labels"))?;
        if terms.iter().any(|t| t.mark != Mark::Unit && t.symbol == symbol) {
            return Err(format!("`{name}` appears twice in one tensor"));
        }
        terms.push(Term { mark, symbol });
    }
    Ok(terms)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(text: &str, inputs: &[usize], outputs: &[usize]) -> Result<Arc<Labels>, Refusal> {
        Signature::parse(text).unwrap().bind(|i| inputs[i], |k| outputs.get(k).copied())
    }

    #[test]
    fn labels_are_numbered_by_first_appearance() {
        let signature = Signature::parse("[v] d, ..m -> ..m d").unwrap();
        let labels = bound("[v] d, ..m -> ..m d", &[2, 3], &[]).unwrap();
        assert_eq!(labels.count(), 5);
        assert_eq!((0..5).map(|l| labels.name(l)).collect::<Vec<_>>(), ["v", "d", "m0", "m1", "m2"]);
        assert_eq!(labels.outputs(), [vec![2, 3, 4, 1]]);
        assert_eq!((labels.number("m1"), labels.number("d"), labels.number("m3")), (Some(3), Some(1), None));
        assert_eq!(signature.labels().collect::<Vec<_>>(), ["v", "d", "..m"]);
    }

    #[test]
    fn scalars_units_and_ellipses_only_in_outputs() {
        let scalar = Signature::parse("..m,  -> ..m").unwrap();
        assert_eq!((scalar.num_inputs(), scalar.inputs()[1].len()), (2, 0));
        let keep = Signature::parse("..m d!, ..m 1 -> ..m d!").unwrap();
        let labels = bound("..m d!, ..m 1 -> ..m d!", &[2, 2], &[]).unwrap();
        assert_eq!(labels.inputs()[1], [0, Labels::UNIT]);
        assert_eq!(labels.unsharded(&keep.inputs()[0]).collect::<Vec<_>>(), [1]);
        assert_eq!(bound("d -> ..m d", &[1], &[3]).unwrap().count(), 3);
        assert_eq!(bound("d -> ..m d", &[1], &[]).unwrap_err().code, "shape");
        let wide = bound("..m d -> ..m", &[NUM_WIDTHS + 3], &[]).unwrap();
        assert_eq!((wide.count(), wide.number("d")), (NUM_WIDTHS + 3, Some(NUM_WIDTHS as u8 + 2)));
        let two = bound("..m a, ..n a -> ..m", &[3, 2], &[]).unwrap();
        assert_eq!((0..4).map(|x| two.name(x)).collect::<Vec<_>>(), ["m0", "m1", "a", "n0"]);
    }

    #[test]
    fn wrong_numbers_of_dims_are_refused() {
        let few = bound("..m k, k n -> ..m n", &[0, 2], &[]).unwrap_err();
        assert_eq!(few.message, "argument 0 has ndim 0, but `..m k` needs at least 1");
        let many = bound("..m k, k n -> ..m n", &[1, 3], &[]).unwrap_err();
        assert_eq!(many.message, "argument 1 has ndim 3, but `k n` needs 2");
        let other = bound("..m, ..m -> ..m", &[1, 2], &[]).unwrap_err();
        assert_eq!(other.message, "argument 1 has ndim 2, but `..m` needs 1");
    }

    #[test]
    fn invalid_signatures_are_refused() {
        for bad in [
            "a b",
            "a a -> a",
            "a ..m -> a",
            "..m, m -> m",
            "a+ -> a",
            "[v -> v",
            "..m m0 -> m0",
            "a!! -> a",
            "! ->",
        ] {
            assert!(Signature::parse(bad).is_err(), "{bad}");
        }
        assert!(Signature::parse("a->b->c").is_err(), "two arrows");
        let many = |count: u8| {
            format!("..m {} -> ..m", (1..count).map(|i| format!("x{i}")).collect::<Vec<_>>().join(" "))
        };
        assert!(
            Signature::parse(&many(SYMBOLS_MAX)).is_ok() && Signature::read(&many(SYMBOLS_MAX + 1)).is_err()
        );
    }
}
