//! The ops, and the list of ops for tests, docs and benchmarks. An op is a file, which a linear op and its transpose share,
//! or a row of a table: the elementwise functions of one argument are the table [`unary`].

mod labels;
mod reduced_dims;
mod shard_candidates;
pub mod scale;
pub mod sum;
mod broadcast;
pub mod mul;
pub mod neg;
pub mod div;
pub mod add;
pub mod sub;
mod unary_row;
pub mod unary;
pub mod clamp;
pub mod pow;
pub mod maximum;
pub mod compare;
pub mod logical;
pub mod masked_fill;
pub mod where_cond;
pub mod cast;
pub mod embedding;
pub mod gather;
pub mod flip;
pub mod one_hot;
pub mod sort;
pub mod top_k;
pub mod triangle;
pub mod roll;
pub mod diagonal;
pub mod amax;
pub mod cross_entropy_terms;
pub mod dropout;
pub mod einsum;
pub mod linear;
pub mod mlp;
pub mod layer_norm;
pub mod max_last;
pub mod log_sum_exp;
pub mod cumsum;
pub mod gated_scan;
pub mod argmax;
pub mod permute;
pub mod reshape;
pub mod rms_norm;
pub mod rope;
pub mod slice;
pub mod concat;
pub mod split;
pub mod softmax;
pub mod sum_squares;
pub mod swiglu;
pub mod experts;
pub mod unbind;
pub(crate) mod attention_mask;
pub mod ring_attention;
pub mod attention;
pub mod redistribute;

use crate::op::Op;
pub(crate) use labels::ARGUMENTS_MAX;
use shardgrad_kernels::DType;
use std::rc::Rc;

/// The values that tests draw for an argument.
#[derive(Clone, Debug)]
pub enum Input {
    /// Floats of a shape, in -2..2.
    Real(Vec<usize>),
    /// Floats of a shape, in 0.5..2.5 (for logarithms, divisors).
    Positive(Vec<usize>),
    /// Floats of a shape, all at least 1/8 apart (for sorting).
    Distinct(Vec<usize>),
    /// Floats of a shape, less than 2 from a center (for exponentials, which overflow above 709).
    Offset(Vec<usize>, f64),
    /// Integers of a shape, in 0..bound.
    Index(Vec<usize>, usize),
    /// Bools of a shape.
    Bool(Vec<usize>),
}

impl Input {
    /// [`Input::Real`] of a shape.
    #[must_use]
    pub fn real(shape: &[usize]) -> Input {
        Input::Real(shape.to_vec())
    }

    /// [`Input::Positive`] of a shape.
    #[must_use]
    pub fn positive(shape: &[usize]) -> Input {
        Input::Positive(shape.to_vec())
    }

    /// [`Input::Distinct`] of a shape.
    #[must_use]
    pub fn distinct(shape: &[usize]) -> Input {
        Input::Distinct(shape.to_vec())
    }

    /// [`Input::Offset`] of a shape around a center.
    #[must_use]
    pub fn offset(shape: &[usize], center: f64) -> Input {
        Input::Offset(shape.to_vec(), center)
    }

    /// [`Input::Index`] of a shape, in 0..bound.
    #[must_use]
    pub fn index(shape: &[usize], bound: usize) -> Input {
        Input::Index(shape.to_vec(), bound)
    }

    /// [`Input::Bool`] of a shape.
    #[must_use]
    pub fn boolean(shape: &[usize]) -> Input {
        Input::Bool(shape.to_vec())
    }

    /// The same kind of values in another shape.
    #[must_use]
    pub fn with_shape(&self, shape: &[usize]) -> Input {
        let shape = shape.to_vec();
        match self {
            Input::Real(_) => Input::Real(shape),
            Input::Positive(_) => Input::Positive(shape),
            Input::Distinct(_) => Input::Distinct(shape),
            Input::Offset(_, center) => Input::Offset(shape, *center),
            Input::Index(_, bound) => Input::Index(shape, *bound),
            Input::Bool(_) => Input::Bool(shape),
        }
    }

    /// The dtype of the values.
    #[must_use]
    pub fn dtype(&self) -> DType {
        match self {
            Input::Real(_) | Input::Positive(_) | Input::Distinct(_) | Input::Offset(..) => DType::F64,
            Input::Index(..) => DType::I64,
            Input::Bool(_) => DType::Bool,
        }
    }

    /// The shape of the values.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        match self {
            Input::Real(s)
            | Input::Positive(s)
            | Input::Distinct(s)
            | Input::Offset(s, _)
            | Input::Index(s, _)
            | Input::Bool(s) => s,
        }
    }
}

/// A test case: an op and its inputs, which tests run on every layout, forward and backward.
#[derive(Clone, Debug)]
pub struct Case {
    /// The op.
    pub op: Rc<dyn Op>,
    /// The values of its arguments.
    pub inputs: Vec<Input>,
    /// Whether the op is valid for these extents only.
    pub has_fixed_shape: bool,
    /// Whether the op is exact on small binary fractions, so that every layout must give the same bits.
    pub is_exact: bool,
    /// Whether tied elements share a gradient, which is rounded where three elements tie.
    pub has_tied_gradients: bool,
}

impl Case {
    /// A case of an op for any extents; tests run it with extents of 1 too, where most shards are empty.
    #[must_use]
    pub fn new(op: Rc<dyn Op>, inputs: Vec<Input>) -> Case {
        Case { op, inputs, has_fixed_shape: false, is_exact: false, has_tied_gradients: false }
    }

    /// A case of an op for these extents only.
    #[must_use]
    pub fn fixed_shape(op: Rc<dyn Op>, inputs: Vec<Input>) -> Case {
        Case { has_fixed_shape: true, ..Case::new(op, inputs) }
    }

    /// Marks the case as exact.
    #[must_use]
    pub fn exact(self) -> Case {
        Case { is_exact: true, ..self }
    }

    /// Marks the case as one where tied elements share a gradient.
    #[must_use]
    pub fn tied(self) -> Case {
        Case { has_tied_gradients: true, ..self }
    }
}

/// An op file, or a row of a table of ops, in the list of ops.
#[derive(Clone, Copy, Debug)]
pub struct OpModule {
    /// The file name without extension, or the name of the row.
    pub name: &'static str,
    /// Test cases that cover every form of the op.
    pub cases: fn() -> Vec<Case>,
    /// The source code of the file, or the doc comment of the row.
    pub source: &'static str,
}

macro_rules! list {
    (@entry $file:ident) => {
        OpModule {
            name: stringify!($file),
            cases: $file::cases,
            source: include_str!(concat!(stringify!($file), ".rs")),
        }
    };
    (@entry $table:ident $row:ident) => { $table::$row() };
    ($($module:ident $(:: $row:ident)?),* $(,)?) => {
        /// Every op file and row. The order determines the programs that a fuzz seed draws: add new ops in alphabetical order.
        pub const OPS: &[OpModule] = &[$(list!(@entry $module $($row)?)),*];
    };
}

list! {
    unary::abs,
    add,
    unary::add_scalar,
    amax,
    argmax,
    attention,
    cast,
    unary::ceil,
    where_cond,
    clamp,
    compare,
    concat,
    unary::cos,
    cross_entropy_terms,
    cumsum,
    diagonal,
    div,
    dropout,
    einsum,
    unary::elu,
    embedding,
    unary::erf,
    unary::exp,
    experts,
    unary::expm1,
    flip,
    unary::floor,
    gated_scan,
    gather,
    unary::gelu,
    unary::gelu_exact,
    layer_norm,
    unary::leaky_relu,
    linear,
    unary::log,
    unary::log1p,
    log_sum_exp,
    logical,
    masked_fill,
    max_last,
    maximum,
    mlp,
    mul,
    neg,
    one_hot,
    permute,
    pow,
    unary::pow_scalar,
    unary::reciprocal,
    unary::relu,
    reshape,
    ring_attention,
    rms_norm,
    roll,
    rope,
    unary::round,
    unary::rsqrt,
    scale,
    unary::sigmoid,
    unary::sign,
    unary::silu,
    unary::sin,
    slice,
    softmax,
    unary::softplus,
    sort,
    split,
    unary::sqrt,
    unary::square,
    sub,
    sum,
    sum_squares,
    swiglu,
    unary::tanh,
    top_k,
    triangle,
    unbind,
}
