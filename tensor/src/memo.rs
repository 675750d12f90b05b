//! Inferences that were made before: the same question gets the same answer without the work.
//!
//! An answer is handed out only to a question that equals the stored one in every part that inference reads; addresses
//! and the hash merely say where to look.

use crate::infer::{Inference, Rule, infer};
use crate::layout::Layout;
use crate::recent::Recent;
use crate::refusal::Refusal;
use crate::signature::Signature;
use shardgrad_kernels::DType;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::rc::Rc;

/// So many answers are kept; then all are forgotten, so that ever new shapes do not fill the memory.
const ANSWERS_MAX: usize = 4_096;

/// All that inference by signature reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Question<'a> {
    /// Equal texts share one signature in the context.
    pub(crate) signature: &'a Rc<Signature>,
    pub(crate) linear_in: &'static [&'static [usize]],
    pub(crate) differentiable: &'static [bool],
    pub(crate) args: &'a [&'a Layout],
    pub(crate) out_dtypes: &'a [DType],
    pub(crate) want: &'a [Option<Layout>],
}

/// A question that was answered. It keeps its signature alive, so that no other can take its address.
struct Known {
    signature: Rc<Signature>,
    linear_in: &'static [&'static [usize]],
    differentiable: &'static [bool],
    args: SmallVec<[Layout; 2]>,
    out_dtypes: SmallVec<[DType; 4]>,
    want: SmallVec<[Option<Layout>; 1]>,
    answer: Rc<Inference>,
}

impl Known {
    fn new(question: &Question<'_>, answer: Inference) -> Known {
        Known {
            signature: question.signature.clone(),
            linear_in: question.linear_in,
            differentiable: question.differentiable,
            args: question.args.iter().map(|l| (*l).clone()).collect(),
            out_dtypes: SmallVec::from_slice(question.out_dtypes),
            want: question.want.iter().cloned().collect(),
            answer: Rc::new(answer),
        }
    }

    fn is(&self, question: &Question<'_>) -> bool {
        Rc::ptr_eq(&self.signature, question.signature)
            && same(self.linear_in, question.linear_in)
            && same(self.differentiable, question.differentiable)
            && self.args.len() == question.args.len()
            && self.args.iter().zip(question.args).all(|(known, asked)| known == *asked)
            && self.out_dtypes.as_slice() == question.out_dtypes
            && self.want.as_slice() == question.want
    }
}

/// Whether two lists that an op declares are equal. They nearly always are one list, or empty, and to compare the memory of
/// none is dear: where it begins is no address, and processors stumble over that.
fn same<T: PartialEq>(a: &[T], b: &[T]) -> bool {
    std::ptr::eq(a, b) || a.iter().eq(b)
}

/// Questions of one hash: nearly always one.
type Answered = SmallVec<[Rc<Known>; 1]>;

/// What one rank has inferred.
#[derive(Default)]
pub(crate) struct Memo {
    /// By the addresses of the parts of the question.
    recent: Recent<Known>,
    /// By their hash.
    known: RefCell<HashMap<u64, Answered, Quick>>,
}

impl Memo {
    /// What the rule says, from memory if it was asked before. Refusals are not kept.
    ///
    /// # Errors
    /// As [`infer`].
    pub(crate) fn answer(&self, question: &Question<'_>) -> Result<Rc<Inference>, Refusal> {
        self.answer_at(place(question), || hash(question), question)
    }

    fn answer_at(
        &self,
        place: u64,
        hash: impl FnOnce() -> u64,
        question: &Question<'_>,
    ) -> Result<Rc<Inference>, Refusal> {
        let serves = |known: &Rc<Known>| known.is(question).then(|| known.answer.clone());
        if let Some(answer) = self.recent.find(place, serves) {
            return Ok(answer);
        }
        let known = self.known_at(hash(), question)?;
        self.recent.keep(place, &known);
        Ok(known.answer.clone())
    }

    fn known_at(&self, hash: u64, question: &Question<'_>) -> Result<Rc<Known>, Refusal> {
        if let Some(known) = self.known.borrow().get(&hash)
            && let Some(known) = known.iter().find(|k| k.is(question))
        {
            return Ok(known.clone());
        }
        let want: SmallVec<[Option<&Layout>; 4]> = question.want.iter().map(Option::as_ref).collect();
        let Question { signature, linear_in, differentiable, args, out_dtypes, .. } = *question;
        let answer = infer(&Rule { signature, linear_in, differentiable }, args, out_dtypes, &want)?;
        let new = Rc::new(Known::new(question, answer));
        let mut known = self.known.borrow_mut();
        if known.len() >= ANSWERS_MAX {
            known.clear();
        }
        known.entry(hash).or_default().push(new.clone());
        Ok(new)
    }
}

impl fmt::Debug for Memo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memo({} answers)", self.known.borrow().len())
    }
}

/// Where to look for an answer that was given to a question of these very handles.
fn place(question: &Question<'_>) -> u64 {
    let mut mix = Mix::default();
    mix.write_usize(Rc::as_ptr(question.signature).addr());
    question.args.iter().for_each(|l| mix.write_usize(l.address()));
    question.want.iter().flatten().for_each(|l| mix.write_usize(l.address()));
    mix.finish()
}

/// Where to look for an answer. The declared groups and masks go with the signature, nearly always.
fn hash(question: &Question<'_>) -> u64 {
    let mut mix = Mix::default();
    mix.write_usize(Rc::as_ptr(question.signature).addr());
    question.args.iter().for_each(|l| l.hash(&mut mix));
    question.out_dtypes.hash(&mut mix);
    question.want.hash(&mut mix);
    mix.finish()
}

/// A quick hash for tables whose keys nobody chooses against us: rotate, xor, multiply.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Mix(u64);

/// Makes [`Mix`] hashers.
pub(crate) type Quick = BuildHasherDefault<Mix>;

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        // Tables take the low bits, which the multiplication leaves weak.
        self.0 ^ (self.0 >> 32)
    }

    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks();
        words.iter().for_each(|word| self.write_u64(u64::from_le_bytes(*word)));
        if !rest.is_empty() {
            self.write_u64(rest.iter().rfold(0, |word, byte| word << 8 | u64::from(*byte)));
        }
    }

    fn write_u64(&mut self, x: u64) {
        self.0 = (self.0.rotate_left(5) ^ x).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn write_u16(&mut self, x: u16) {
        self.write_u64(x.into());
    }

    fn write_u8(&mut self, x: u8) {
        self.write_u64(x.into());
    }

    fn write_u32(&mut self, x: u32) {
        self.write_u64(x.into());
    }

    fn write_usize(&mut self, x: usize) {
        self.write_u64(x as u64);
    }

    fn write_isize(&mut self, x: isize) {
        self.write_u64(x as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_dist::Mesh;

    /// A question that owns its parts.
    struct Asked {
        signature: Rc<Signature>,
        linear_in: &'static [&'static [usize]],
        differentiable: &'static [bool],
        args: Vec<Layout>,
        out_dtypes: Vec<DType>,
        want: Vec<Option<Layout>>,
    }

    impl Asked {
        fn ask(&self, memo: &Memo) -> Rc<Inference> {
            let args: Vec<&Layout> = self.args.iter().collect();
            let question = Question {
                signature: &self.signature,
                linear_in: self.linear_in,
                differentiable: self.differentiable,
                args: &args,
                out_dtypes: &self.out_dtypes,
                want: &self.want,
            };
            // One place for all: what keeps answers apart must be the comparison alone.
            memo.answer_at(0, || 0, &question).unwrap()
        }
    }

    fn layouts(mesh: &str, texts: &[&str]) -> Vec<Layout> {
        let mesh = Mesh::parse(mesh).unwrap();
        texts.iter().map(|t| Layout::parse(t, &mesh).unwrap()).collect()
    }

    /// Questions of which each differs from the first in one part.
    fn questions() -> Vec<Asked> {
        let signature = Rc::new(Signature::parse("..m, ..m -> ..m").unwrap());
        let base = |mesh: &str, args: &[&str]| Asked {
            signature: signature.clone(),
            linear_in: &[&[0, 1]],
            differentiable: &[],
            args: layouts(mesh, args),
            out_dtypes: vec![DType::F32],
            want: vec![],
        };
        let plain = |mesh: &str| base(mesh, &["f32[12, 4] +a", "f32[12, 4] +a"]);
        let with = |args: &[&str]| base("a=2,b=3", args);
        let other = Rc::new(Signature::parse("..m d!, ..m d! -> ..m d!").unwrap());
        let created = Rc::new(Signature::parse("..m, ..m -> ..m d").unwrap());
        let wanted = |text: &str| Asked {
            signature: created.clone(),
            want: layouts("a=2,b=3", &[text]).into_iter().map(Some).collect(),
            ..plain("a=2,b=3")
        };
        vec![
            plain("a=2,b=3"),
            plain("a=3,b=2"),
            Asked { signature: other, ..plain("a=2,b=3") },
            Asked { linear_in: &[], ..plain("a=2,b=3") },
            Asked { linear_in: &[&[0], &[1]], ..plain("a=2,b=3") },
            Asked { out_dtypes: vec![DType::F64], ..plain("a=2,b=3") },
            with(&["f32[12, 4] +b", "f32[12, 4] +b"]),
            with(&["f32[12, 4] +a", "f32[12, 4] +a ~b"]),
            Asked { differentiable: &[true, false], ..with(&["f32[12, 4] +a", "f32[12, 4] +a ~b"]) },
            with(&["f64[12, 4] +a", "f64[12, 4] +a"]),
            with(&["f32[12@b, 4] +a", "f32[12@b, 4] +a"]),
            with(&["f32[12, 4@b] +a", "f32[12, 4@b] +a"]),
            with(&["f32[12@a@b, 4]", "f32[12@a@b, 4]"]),
            with(&["f32[12@b@a, 4]", "f32[12@b@a, 4]"]),
            with(&["f32[12:6, 4] +a", "f32[12:6, 4] +a"]),
            with(&["f32[24, 4] +a", "f32[24, 4] +a"]),
            wanted("f32[12, 4, 6]"),
            wanted("f32[12, 4, 6@b]"),
            wanted("f32[12, 4, 9]"),
        ]
    }

    #[test]
    fn every_part_of_a_question_counts() {
        let (memo, text) = (Memo::default(), |i: &Inference| format!("{i:?}"));
        let fresh: Vec<String> = questions().iter().map(|q| text(&q.ask(&Memo::default()))).collect();
        // Later questions find the answers to all earlier ones at their place.
        let questions = questions();
        for _ in 0..2 {
            for (i, question) in questions.iter().enumerate() {
                assert_eq!(text(&question.ask(&memo)), fresh[i], "question {i} got another's answer");
            }
        }
        assert_eq!(memo.known.borrow()[&0].len(), questions.len(), "each was answered once");
        assert!(Rc::ptr_eq(&questions[0].ask(&memo), &questions[0].ask(&memo)));
    }

    #[test]
    fn memory_is_bounded() {
        let memo = Memo::default();
        let question = &questions()[0];
        let args: Vec<&Layout> = question.args.iter().collect();
        for hash in 0..2 * ANSWERS_MAX as u64 + 1 {
            let question = Question {
                signature: &question.signature,
                linear_in: question.linear_in,
                differentiable: question.differentiable,
                args: &args,
                out_dtypes: &question.out_dtypes,
                want: &question.want,
            };
            // Past the recent ones, which would answer all of these.
            let _ = memo.known_at(hash, &question).unwrap();
        }
        assert!(memo.known.borrow().len() <= ANSWERS_MAX);
    }
}
