//! The kernels: one folder each, with the contract, the plain reference, the fast path and the tests.

#[cfg(test)]
mod check;
#[cfg(test)]
mod differences;
mod rows;
mod walk;
mod pointwise;
pub mod copy;
pub mod fill;
pub mod binary;
pub mod unary;
pub mod reduce;
pub mod contract;
pub mod ranks;
pub mod softmax;
pub mod layer_norm;
pub mod rms_norm;
pub mod attention;
pub mod cross_entropy;
pub mod embedding;
pub mod adamw;
pub mod random;
pub mod rope;
pub mod swiglu;

use crate::kernel::Kernel;

/// Every kernel, in the order of the folders.
pub static KERNELS: &[&Kernel] = &[
    &copy::COPY,
    &fill::FILL,
    &binary::ADD,
    &binary::SUB,
    &binary::MUL,
    &binary::DIV,
    &binary::ACCUMULATE,
    &unary::NEG,
    &unary::EXP,
    &unary::LOG,
    &unary::SQRT,
    &unary::TANH,
    &unary::RELU,
    &unary::GELU,
    &unary::GELU_EXACT,
    &unary::SIGMOID,
    &unary::ERF,
    &unary::SILU,
    &unary::SQUARE,
    &unary::RECIPROCAL,
    &unary::SCALE,
    &unary::ADD_SCALAR,
    &unary::GELU_GRAD,
    &unary::GELU_EXACT_GRAD,
    &unary::SIGMOID_GRAD,
    &unary::ERF_GRAD,
    &unary::SILU_GRAD,
    &unary::RELU_GRAD,
    &unary::TANH_GRAD,
    &reduce::SUM,
    &reduce::MAX,
    &reduce::SUM_SQUARES,
    &contract::CONTRACT,
    &ranks::SUM,
    &ranks::MAX,
    &ranks::MIN,
    &softmax::FORWARD,
    &softmax::BACKWARD,
    &layer_norm::FORWARD,
    &layer_norm::BACKWARD,
    &rms_norm::FORWARD,
    &rms_norm::BACKWARD,
    &attention::FORWARD,
    &attention::BACKWARD,
    &cross_entropy::TERMS,
    &cross_entropy::BACKWARD,
    &embedding::FORWARD,
    &embedding::BACKWARD,
    &adamw::STEP,
    &random::UNIFORM,
    &random::NORMAL,
    &random::DROPOUT,
    &rope::ROTATE,
    &swiglu::FORWARD,
    &swiglu::BACKWARD,
];

#[cfg(test)]
mod tests {
    use super::KERNELS;

    #[test]
    fn every_kernel_is_listed_once_under_its_own_name() {
        let mut names: Vec<&str> = KERNELS.iter().map(|kernel| kernel.name).collect();
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
    }
}
