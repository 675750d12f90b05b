//! The ops, one file each, and the list that tests, documents and benches walk.

pub mod einsum;

use crate::op::Op;
use std::rc::Rc;

/// What a test may feed to an argument.
#[derive(Clone, Debug)]
pub enum Input {
    /// Real numbers of a shape, in -2..2.
    Real(Vec<usize>),
    /// Real numbers of a shape, in 0.5..2.5 (logarithms, divisors).
    Positive(Vec<usize>),
    /// Integers of a shape in 0..bound.
    Index(Vec<usize>, usize),
}

impl Input {
    /// Real numbers of a shape.
    #[must_use]
    pub fn real(shape: &[usize]) -> Input {
        Input::Real(shape.to_vec())
    }

    /// Real numbers away from zero.
    #[must_use]
    pub fn positive(shape: &[usize]) -> Input {
        Input::Positive(shape.to_vec())
    }

    /// Integers in 0..bound.
    #[must_use]
    pub fn index(shape: &[usize], bound: usize) -> Input {
        Input::Index(shape.to_vec(), bound)
    }

    /// The shape.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        match self {
            Input::Real(s) | Input::Positive(s) | Input::Index(s, _) => s,
        }
    }
}

/// One way to call an op: what the exhaustive tests run on every layout, forward and backward.
#[derive(Clone, Debug)]
pub struct Case {
    /// The op.
    pub op: Rc<dyn Op>,
    /// What its arguments look like.
    pub inputs: Vec<Input>,
}

impl Case {
    /// A call of an op.
    #[must_use]
    pub fn new(op: Rc<dyn Op>, inputs: Vec<Input>) -> Case {
        Case { op, inputs }
    }
}

/// An entry of the list of ops.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The file's name.
    pub name: &'static str,
    /// Calls that together show every form of the op.
    pub cases: fn() -> Vec<Case>,
}

macro_rules! list {
    ($($name:ident),* $(,)?) => {
        /// Every op file, in alphabetical order.
        pub const OPS: &[Entry] = &[$(Entry { name: stringify!($name), cases: $name::cases }),*];
    };
}

list! {
    einsum,
}
