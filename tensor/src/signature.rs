//! Index signatures: one line that says which dims of which tensors are the same thing.
//!
//! `signature = tensor {"," tensor} "->" tensor {"," tensor}`; a tensor is labels separated by blanks (none: a
//! scalar). `x` is a free label; `x!` must be whole on every rank; `..m` stands for any number of leading labels, the
//! same in every tensor that writes `..m`; `[v]` is indexed: contracted against indices, the kernel gets its range and
//! rows outside are zeros; `1` is a dim of extent 1 that is never split. A label binds one extent. A label in no output
//! is contracted, one in no input is created.

use crate::refusal::Refusal;
use shardgrad_dist::{Error, Kind, Result};
use smallvec::SmallVec;
use std::fmt;
use std::sync::Arc;

/// What is said about one dim of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// `x`
    Free,
    /// `x!`
    Whole,
    /// `[v]`
    Indexed,
    /// `..m`
    Spread,
    /// `1`
    One,
}

/// One word of a tensor in a signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term {
    /// What is said about the dim, or about the dims of `..m`.
    pub mark: Mark,
    symbol: u8,
}

/// A name that the signature uses, in order of first appearance.
#[derive(Debug, PartialEq, Eq)]
struct Symbol {
    name: Box<str>,
    spread: bool,
}

/// A parsed index signature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    text: Box<str>,
    symbols: Arc<[Symbol]>,
    inputs: Vec<Vec<Term>>,
    outputs: Vec<Vec<Term>>,
    /// The numbered labels for widths of the one `..m` from 0 on (or for no width, without a `..m`).
    ready: Vec<Arc<Labels>>,
}

/// For so many widths of `..m` the labels are numbered when the signature is read.
const NUM_READY: usize = 6;

/// With so many names no width that is made ready has more labels than there are numbers.
const SYMBOLS_MAX: u8 = Labels::ONE - NUM_READY as u8;

impl Signature {
    /// Reads a signature such as `..m d!, d! -> ..m d!`.
    ///
    /// # Errors
    /// `Kind::Shape` naming the word that is no term, a label that stands twice in one tensor, a `..m` that does not
    /// lead, and names that `..m` would produce as well (`m0`).
    pub fn parse(text: &str) -> Result<Signature> {
        let mut signature = Signature::read(text)?;
        let num_spread = signature.symbols.iter().filter(|s| s.spread).count();
        let num_ready = [1, NUM_READY].into_iter().nth(num_spread).unwrap_or(0);
        let ready = (0..num_ready).map(|width| signature.number(|_| width)).collect::<Result<_, _>>();
        signature.ready = ready.map_err(|e| refuse(text, &e.message))?;
        Ok(signature)
    }

    /// [`Signature::parse`] for who asks only whether a text is a signature, and what it says: no label is numbered.
    pub(crate) fn read(text: &str) -> Result<Signature> {
        let (left, right) = text.split_once("->").ok_or_else(|| refuse(text, "`->` is missing"))?;
        let mut symbols = Vec::new();
        let mut side = |side: &str| {
            let tensors = side.split(',').map(|t| terms(t, &mut symbols));
            tensors.collect::<Result<Vec<_>, String>>().map_err(|why| refuse(text, &why))
        };
        let (inputs, outputs) = (side(left)?, side(right)?);
        for spread in symbols.iter().filter(|s| s.spread) {
            let produced = |s: &&Symbol| spread_index(&s.name, &spread.name).is_some();
            if let Some(same) = symbols.iter().find(produced) {
                let why = format!("`..{}` stands for labels like `{}`", spread.name, same.name);
                return Err(refuse(text, &why));
            }
        }
        Ok(Signature { text: text.into(), symbols: symbols.into(), inputs, outputs, ready: Vec::new() })
    }

    /// Numbers the labels, given the width of each spread symbol.
    fn number(&self, width: impl Fn(usize) -> usize) -> Result<Arc<Labels>, Refusal> {
        let mut starts = vec![0];
        let mut next = 0;
        for (s, symbol) in self.symbols.iter().enumerate() {
            next += if symbol.spread { width(s) } else { 1 };
            if next > usize::from(Labels::ONE) {
                return Err(Refusal::new(
                    "shape",
                    format!("`{self}` has more than {} labels", Labels::ONE),
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

    /// What was read.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// The number of arguments.
    #[must_use]
    pub fn num_inputs(&self) -> usize {
        self.inputs.len()
    }

    /// The number of outputs.
    #[must_use]
    pub fn num_outputs(&self) -> usize {
        self.outputs.len()
    }

    /// The terms of each argument.
    #[must_use]
    pub fn inputs(&self) -> &[Vec<Term>] {
        &self.inputs
    }

    /// The terms of each output.
    #[must_use]
    pub fn outputs(&self) -> &[Vec<Term>] {
        &self.outputs
    }

    /// The name of a term without its mark: `m` for `..m`, `v` for `[v]`, `1` for `1`.
    #[must_use]
    pub fn name(&self, term: Term) -> &str {
        if term.mark == Mark::One { "1" } else { &self.symbols[term.symbol as usize].name }
    }

    /// The labels in order of first appearance, `..m` written as `..m`.
    pub fn labels(&self) -> impl Iterator<Item = String> {
        self.symbols.iter().map(|s| format!("{}{}", if s.spread { ".." } else { "" }, s.name))
    }

    /// Gives every label a number by the numbers of dims of the arguments and, for `..m` that no argument has, of the
    /// outputs where they are known.
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
            self.solve(terms, inputs(i), &mut widths, || format!("argument {i}"), &[(i, 0)])?;
        }
        for (k, terms) in self.outputs.iter().enumerate() {
            if let Some(ndim) = outputs(k) {
                self.solve(terms, ndim, &mut widths, || format!("the wanted output {k}"), &[])?;
            }
        }
        let known =
            |s: usize| widths.iter().find(|(known, _)| usize::from(*known) == s).map(|(_, width)| *width);
        let spread = self.symbols.iter().enumerate().filter(|(_, symbol)| symbol.spread);
        if let Some((_, symbol)) = spread.clone().find(|(s, _)| known(*s).is_none()) {
            let text = format!("no layout says how many dims `..{}` stands for", symbol.name);
            return Err(Refusal::new("shape", text, &[]));
        }
        let width = widths.first().map_or(0, |(_, width)| *width);
        match self.ready.get(width) {
            Some(labels) => Ok(labels.clone()),
            None => self.number(|s| known(s).unwrap_or_default()),
        }
    }

    /// Finds the width of the spread of a tensor, or checks the one that is known.
    fn solve(
        &self,
        terms: &[Term],
        ndim: usize,
        widths: &mut SmallVec<[(u8, usize); 2]>,
        whose: impl Fn() -> String,
        places: &[(usize, usize)],
    ) -> Result<(), Refusal> {
        let spread = terms.first().filter(|t| t.mark == Mark::Spread);
        let fixed = terms.len() - usize::from(spread.is_some());
        let known = spread.and_then(|t| widths.iter().find(|(s, _)| *s == t.symbol)).map(|(_, width)| *width);
        match (spread, known) {
            (None, _) if ndim == fixed => return Ok(()),
            (Some(_), Some(width)) if ndim == fixed + width => return Ok(()),
            (Some(term), None) if ndim >= fixed => {
                widths.push((term.symbol, ndim - fixed));
                return Ok(());
            }
            _ => {}
        }
        let wanted = match (spread, known) {
            (Some(_), None) => format!("at least {fixed}"),
            (_, width) => (fixed + width.unwrap_or(0)).to_string(),
        };
        let terms = self.spell(terms);
        let text = format!("{} has ndim {ndim}, but `{terms}` asks for {wanted}", whose());
        Err(Refusal::new("shape", text, places))
    }

    fn spell(&self, terms: &[Term]) -> String {
        let word = |t: &Term| {
            let name = self.name(*t);
            match t.mark {
                Mark::Free | Mark::One => name.to_string(),
                Mark::Whole => format!("{name}!"),
                Mark::Indexed => format!("[{name}]"),
                Mark::Spread => format!("..{name}"),
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

/// The numbers of all labels of a signature once the numbers of dims are known. Labels are numbered in order of first
/// appearance, `..m` counting as `m0 m1 ..`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labels {
    symbols: Arc<[Symbol]>,
    /// Where the labels of each symbol begin; one entry more than there are symbols.
    starts: Vec<u8>,
    inputs: Vec<Vec<u8>>,
    outputs: Vec<Vec<u8>>,
}

impl Labels {
    /// Stands for a `1` dim, which has no label.
    pub const ONE: u8 = u8::MAX;

    /// How many labels there are.
    #[must_use]
    pub fn count(&self) -> usize {
        *self.starts.last().expect("there is one entry more than symbols") as usize
    }

    /// Per argument and dim the number of its label, or [`Labels::ONE`].
    #[must_use]
    pub fn inputs(&self) -> &[Vec<u8>] {
        &self.inputs
    }

    /// Per output and dim the number of its label, or [`Labels::ONE`].
    #[must_use]
    pub fn outputs(&self) -> &[Vec<u8>] {
        &self.outputs
    }

    fn of(&self, terms: &[Term]) -> Vec<u8> {
        let mut labels = Vec::new();
        for term in terms {
            match term.mark {
                Mark::One => labels.push(Labels::ONE),
                _ => labels.extend(self.numbers(term.symbol as usize)),
            }
        }
        labels
    }

    /// The labels that a tensor marks with `!`.
    pub(crate) fn whole(&self, terms: &[Term]) -> impl Iterator<Item = u8> {
        terms.iter().filter(|t| t.mark == Mark::Whole).map(|t| self.starts[t.symbol as usize])
    }

    fn numbers(&self, symbol: usize) -> std::ops::Range<u8> {
        self.starts[symbol]..self.starts[symbol + 1]
    }

    /// The name of a label: `k`, or `m1` for the second one of `..m`.
    #[must_use]
    pub fn name(&self, label: u8) -> String {
        let symbol = (0..self.symbols.len()).find(|s| self.numbers(*s).contains(&label));
        match symbol.map(|s| (&self.symbols[s], label - self.starts[s])) {
            Some((symbol, i)) if symbol.spread => format!("{}{i}", symbol.name),
            Some((symbol, _)) => symbol.name.to_string(),
            None => "1".into(),
        }
    }

    /// The number of a label by its name.
    #[must_use]
    pub fn number(&self, name: &str) -> Option<u8> {
        self.symbols.iter().enumerate().find_map(|(s, symbol)| {
            let i = if symbol.spread {
                spread_index(name, &symbol.name)
            } else {
                (*symbol.name == *name).then_some(0)
            };
            self.numbers(s).nth(i?)
        })
    }
}

/// `1` for the name `m1` of a label of the spread `m`.
fn spread_index(name: &str, spread: &str) -> Option<usize> {
    let digits = name.strip_prefix(spread)?;
    digits.parse().ok().filter(|_| digits.bytes().all(|b| b.is_ascii_digit()))
}

fn refuse(text: &str, why: &str) -> Error {
    Error::new(Kind::Shape, format!("`{text}` is no signature: {why}"))
}

fn terms(tensor: &str, symbols: &mut Vec<Symbol>) -> Result<Vec<Term>, String> {
    let mut terms: Vec<Term> = Vec::new();
    for word in tensor.split_whitespace() {
        let (mark, name) = match (word.strip_prefix(".."), word.strip_prefix('['), word.strip_suffix('!')) {
            (Some(name), _, _) => (Mark::Spread, name),
            (_, Some(rest), _) => (Mark::Indexed, rest.strip_suffix(']').unwrap_or("")),
            (_, _, Some(name)) => (Mark::Whole, name),
            _ if word == "1" => (Mark::One, word),
            _ => (Mark::Free, word),
        };
        let letters = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        if mark != Mark::One && !(letters && name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_'))
        {
            return Err(format!("`{word}` is no label; write x, x!, ..x, [x] or 1"));
        }
        if mark == Mark::Spread && !terms.is_empty() {
            return Err(format!("`{word}` does not lead its tensor"));
        }
        if mark == Mark::One {
            terms.push(Term { mark, symbol: 0 });
            continue;
        }
        let symbol = symbols.iter().position(|s| *s.name == *name).unwrap_or_else(|| {
            symbols.push(Symbol { name: name.into(), spread: mark == Mark::Spread });
            symbols.len() - 1
        });
        if symbols[symbol].spread != (mark == Mark::Spread) {
            return Err(format!("`{name}` and `..{name}` are two things; name one of them differently"));
        }
        let symbol = u8::try_from(symbol).ok().filter(|symbol| *symbol < SYMBOLS_MAX);
        let symbol = symbol.ok_or_else(|| format!("it has more than {SYMBOLS_MAX} labels"))?;
        if terms.iter().any(|t| t.mark != Mark::One && t.symbol == symbol) {
            return Err(format!("`{name}` stands twice in one tensor"));
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
    fn scalars_ones_and_spreads_that_only_outputs_have() {
        let scalar = Signature::parse("..m,  -> ..m").unwrap();
        assert_eq!((scalar.num_inputs(), scalar.inputs()[1].len()), (2, 0));
        let keep = Signature::parse("..m d!, ..m 1 -> ..m d!").unwrap();
        let labels = bound("..m d!, ..m 1 -> ..m d!", &[2, 2], &[]).unwrap();
        assert_eq!(labels.inputs()[1], [0, Labels::ONE]);
        assert_eq!(labels.whole(&keep.inputs()[0]).collect::<Vec<_>>(), [1]);
        assert_eq!(bound("d -> ..m d", &[1], &[3]).unwrap().count(), 3);
        assert_eq!(bound("d -> ..m d", &[1], &[]).unwrap_err().code, "shape");
        let wide = bound("..m d -> ..m", &[NUM_READY + 3], &[]).unwrap();
        assert_eq!((wide.count(), wide.number("d")), (NUM_READY + 3, Some(NUM_READY as u8 + 2)));
        let two = bound("..m a, ..n a -> ..m", &[3, 2], &[]).unwrap();
        assert_eq!((0..4).map(|x| two.name(x)).collect::<Vec<_>>(), ["m0", "m1", "a", "n0"]);
    }

    #[test]
    fn numbers_of_dims_that_do_not_fit_are_refused() {
        let few = bound("..m k, k n -> ..m n", &[0, 2], &[]).unwrap_err();
        assert_eq!(few.message, "argument 0 has ndim 0, but `..m k` asks for at least 1");
        let many = bound("..m k, k n -> ..m n", &[1, 3], &[]).unwrap_err();
        assert_eq!(many.message, "argument 1 has ndim 3, but `k n` asks for 2");
        let other = bound("..m, ..m -> ..m", &[1, 2], &[]).unwrap_err();
        assert_eq!(other.message, "argument 1 has ndim 2, but `..m` asks for 1");
    }

    #[test]
    fn texts_that_are_no_signatures() {
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
