//! Test oracles for ops and models: [`check_op!`] checks an op on every layout and against finite differences,
//! [`fuzz_model!`] compares a model on random meshes with one rank.
//!
//! Both macros serve ops and models outside of this workspace too. Add this crate as a dev-dependency: then only tests
//! compile it.

#![forbid(unsafe_code)]

mod global_tensor;
mod max_difference;
mod random_numbers;
mod sample;
pub mod op_check;
pub mod fuzz;

pub use global_tensor::GlobalTensor;
pub use max_difference::max_difference;
pub use random_numbers::random_numbers;
pub use sample::sample;
pub use shardgrad_tensor::ops::{Case, Input};

/// Checks an op (see [`check_op`](op_check::check_op)): the op as a value, then its inputs (see [`Input`]). Returns a
/// `Result` of the numbers checked. Add `fixed` if the op was made for these extents.
///
/// ```
/// use shardgrad_tensor::ops::unary::Square;
/// use shardgrad_testing::{Input, check_op};
/// use std::rc::Rc;
///
/// let tried = check_op!(Rc::new(Square), [Input::real(&[5, 3])])?;
/// assert!(tried.accepted > 100);
/// # Ok::<(), shardgrad_dist::Error>(())
/// ```
#[doc(alias = "gradcheck")]
#[macro_export]
macro_rules! check_op {
    ($op:expr, [$($input:expr),* $(,)?] $(,)?) => {
        $crate::op_check::check_op(|| $crate::Case::new($op, vec![$($input),*]))
    };
    ($op:expr, [$($input:expr),* $(,)?], fixed $(,)?) => {
        $crate::op_check::check_op(|| $crate::Case::fixed_shape($op, vec![$($input),*]))
    };
}

/// Checks a model on random meshes and layouts: its inputs (see [`Input`]), the number of cases, and a function of
/// variables. Returns what [`fuzz::model`] returns.
///
/// ```
/// use shardgrad_autograd::Var;
/// use shardgrad_tensor::Value;
/// use shardgrad_testing::{Input, fuzz_model};
///
/// let report = fuzz_model!(
///     [Input::real(&[4, 3]), Input::real(&[3, 5])],
///     30,
///     |x: &[Var]| vec![x[0].matmul(&x[1]).tanh()]
/// )?;
/// assert!(report.right > 1);
/// # Ok::<(), shardgrad_dist::Error>(())
/// ```
#[macro_export]
macro_rules! fuzz_model {
    ([$($input:expr),* $(,)?], $count:expr, $model:expr $(,)?) => {
        $crate::fuzz::model(&[$($input),*], $count, $model)
    };
}
