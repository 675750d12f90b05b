//! The ops, one file each (a linear op and its transpose share one), and the list that tests, documents and benches walk.

mod labels;
pub mod scale;
pub mod sum;
mod broadcast;
pub mod mul;
pub mod neg;
pub mod div;
pub mod add;
pub mod sub;
mod pointwise;
pub mod add_scalar;
pub mod abs;
pub mod sign;
pub mod rsqrt;
pub mod sin;
pub mod cos;
pub mod expm1;
pub mod log1p;
pub mod softplus;
pub mod elu;
pub mod leaky_relu;
pub mod floor;
pub mod ceil;
pub mod round;
pub mod pow_scalar;
pub mod clamp;
pub mod pow;
pub mod maximum;
pub mod compare;
pub mod logical;
pub mod masked_fill;
pub mod choose;
pub mod attention;
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
pub mod erf;
pub mod exp;
pub mod gelu;
pub mod gelu_exact;
pub mod layer_norm;
pub mod log;
pub mod max_last;
pub mod log_sum_exp;
pub mod cumsum;
pub mod argmax;
pub mod permute;
pub mod reciprocal;
pub mod relu;
pub mod reshape;
pub mod rms_norm;
pub mod rope;
pub mod sigmoid;
pub mod silu;
pub mod slice;
pub mod concat;
pub mod split;
pub mod softmax;
pub mod sqrt;
pub mod square;
pub mod sum_squares;
pub mod swiglu;
pub mod experts;
pub mod tanh;
pub mod unbind;
pub mod redistribute;

use crate::op::Op;
use shardgrad_kernels::DType;
use std::rc::Rc;

/// What a test may feed to an argument.
#[derive(Clone, Debug)]
pub enum Input {
    /// Real numbers of a shape, in -2..2.
    Real(Vec<usize>),
    /// Real numbers of a shape, in 0.5..2.5 (logarithms, divisors).
    Positive(Vec<usize>),
    /// Real numbers of a shape, all different and 1/8 or more apart (orders).
    Distinct(Vec<usize>),
    /// Real numbers of a shape, less than 2 from a number (exponentials, which overflow above 709).
    Offset(Vec<usize>, f64),
    /// Integers of a shape in 0..bound.
    Index(Vec<usize>, usize),
    /// Truth values of a shape.
    Bool(Vec<usize>),
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

    /// Real numbers that are all different.
    #[must_use]
    pub fn distinct(shape: &[usize]) -> Input {
        Input::Distinct(shape.to_vec())
    }

    /// Real numbers around a number.
    #[must_use]
    pub fn offset(shape: &[usize], centre: f64) -> Input {
        Input::Offset(shape.to_vec(), centre)
    }

    /// Integers in 0..bound.
    #[must_use]
    pub fn index(shape: &[usize], bound: usize) -> Input {
        Input::Index(shape.to_vec(), bound)
    }

    /// Truth values of a shape.
    #[must_use]
    pub fn truth(shape: &[usize]) -> Input {
        Input::Bool(shape.to_vec())
    }

    /// The same in another shape.
    #[must_use]
    pub fn with_shape(&self, shape: &[usize]) -> Input {
        let shape = shape.to_vec();
        match self {
            Input::Real(_) => Input::Real(shape),
            Input::Positive(_) => Input::Positive(shape),
            Input::Distinct(_) => Input::Distinct(shape),
            Input::Offset(_, centre) => Input::Offset(shape, *centre),
            Input::Index(_, bound) => Input::Index(shape, *bound),
            Input::Bool(_) => Input::Bool(shape),
        }
    }

    /// The dtype in which tests draw it.
    #[must_use]
    pub fn dtype(&self) -> DType {
        match self {
            Input::Real(_) | Input::Positive(_) | Input::Distinct(_) | Input::Offset(..) => DType::F64,
            Input::Index(..) => DType::I64,
            Input::Bool(_) => DType::Bool,
        }
    }

    /// The shape.
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

/// One way to call an op: what the exhaustive tests run on every layout, forward and backward.
#[derive(Clone, Debug)]
pub struct Case {
    /// The op.
    pub op: Rc<dyn Op>,
    /// What its arguments look like.
    pub inputs: Vec<Input>,
    /// Whether the op is made for these extents only.
    pub is_fixed: bool,
    /// Whether arithmetic on small binary fractions is exact, so that every layout must give the same bits.
    pub is_exact: bool,
    /// Whether elements that are equal share a gradient, which rounds it where there are three of them.
    pub shares_gradients: bool,
}

impl Case {
    /// A call of an op that takes any extents; tests call it with extents of 1 too, where most shards are empty.
    #[must_use]
    pub fn new(op: Rc<dyn Op>, inputs: Vec<Input>) -> Case {
        Case { op, inputs, is_fixed: false, is_exact: false, shares_gradients: false }
    }

    /// A call of an op that was made for these extents.
    #[must_use]
    pub fn fixed(op: Rc<dyn Op>, inputs: Vec<Input>) -> Case {
        Case { is_fixed: true, ..Case::new(op, inputs) }
    }

    /// Says that nothing is rounded.
    #[must_use]
    pub fn exact(self) -> Case {
        Case { is_exact: true, ..self }
    }

    /// Says that elements that are equal share a gradient.
    #[must_use]
    pub fn sharing(self) -> Case {
        Case { shares_gradients: true, ..self }
    }
}

/// An entry of the list of ops.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The file's name.
    pub name: &'static str,
    /// Calls that together show every form of the op.
    pub cases: fn() -> Vec<Case>,
    /// The text of the file.
    pub source: &'static str,
}

macro_rules! list {
    ($($name:ident),* $(,)?) => {
        /// Every op file, in alphabetical order.
        pub const OPS: &[Entry] = &[$(Entry {
            name: stringify!($name),
            cases: $name::cases,
            source: include_str!(concat!(stringify!($name), ".rs")),
        }),*];
    };
}

list! {
    abs,
    add,
    add_scalar,
    amax,
    argmax,
    attention,
    cast,
    ceil,
    choose,
    clamp,
    compare,
    concat,
    cos,
    cross_entropy_terms,
    cumsum,
    diagonal,
    div,
    dropout,
    einsum,
    elu,
    embedding,
    erf,
    exp,
    experts,
    expm1,
    flip,
    floor,
    gather,
    gelu,
    gelu_exact,
    layer_norm,
    leaky_relu,
    linear,
    log,
    log1p,
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
    pow_scalar,
    reciprocal,
    relu,
    reshape,
    rms_norm,
    roll,
    rope,
    round,
    rsqrt,
    scale,
    sigmoid,
    sign,
    silu,
    sin,
    slice,
    softmax,
    softplus,
    sort,
    split,
    sqrt,
    square,
    sub,
    sum,
    sum_squares,
    swiglu,
    tanh,
    top_k,
    triangle,
    unbind,
}
