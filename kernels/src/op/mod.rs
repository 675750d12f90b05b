//! The kernels: one folder each, with contract, reference, fast paths and tests.

#[cfg(test)]
pub(crate) mod kernel_check;
#[cfg(test)]
mod byte_count_tests;
#[cfg(test)]
mod finite_difference;
mod rows;
mod gpu_rows;
mod gpu_sort;
mod strided_iter;
mod formula;
mod pointwise;
mod gpu_row_values;
pub mod copy;
pub mod fill;
pub mod unary;
pub mod binary;
pub mod compare_select;
pub mod reduce;
pub mod batched_matmul;
pub mod leaf_matmul;
pub mod linear;
pub mod grouped_matmul;
pub mod tree_reduce;
pub mod amax_backward;
pub mod log_sum_exp;
pub mod scan;
pub mod gated_scan;
pub mod arg_extreme;
pub mod softmax;
pub mod layer_norm;
pub mod rms_norm;
pub mod attention;
pub mod cross_entropy;
pub mod index;
pub mod embedding;
pub mod one_hot;
pub mod triangular;
pub mod sort;
pub mod sort_by_group;
pub mod overflow_check;
pub mod adamw;
pub mod sgd;
pub mod random;
pub mod rope;
pub mod swiglu;
#[cfg(all(test, feature = "cuda"))]
mod preset_programs_tests;
#[cfg(all(test, feature = "cuda"))]
mod memory_traffic_tests;

use crate::kernel::Kernel;

/// Tables of elementwise kernels.
const TABLES: [&[(&Kernel, &str)]; 3] = [binary::TABLE, unary::TABLE, swiglu::TABLE];

/// The kernels outside of tables, in the order of the folders.
const OTHERS: &[&Kernel] = &[
    &copy::COPY,
    &fill::FILL,
    &binary::ACCUMULATE,
    &compare_select::EQ,
    &compare_select::NE,
    &compare_select::LT,
    &compare_select::LE,
    &compare_select::GT,
    &compare_select::GE,
    &compare_select::AND,
    &compare_select::OR,
    &compare_select::XOR,
    &compare_select::NOT,
    &compare_select::WHERE,
    &compare_select::MASKED_FILL,
    &reduce::SUM,
    &reduce::LEAF_SUM,
    &reduce::MAX,
    &reduce::MIN,
    &reduce::SUM_SQUARES,
    &reduce::SUM_SQUARES_MANY,
    &batched_matmul::BATCHED_MATMUL,
    &leaf_matmul::LEAF_MATMUL,
    &linear::LINEAR,
    &linear::LINEAR_ADD,
    &linear::MATMUL_ADD,
    &linear::LINEAR_GELU,
    &linear::MATMUL_GELU_GRAD,
    &linear::MATMUL_BIAS_GRAD,
    &grouped_matmul::FORWARD,
    &grouped_matmul::WEIGHT_GRAD,
    &tree_reduce::SUM,
    &tree_reduce::MAX,
    &tree_reduce::MIN,
    &amax_backward::COUNT_TIES,
    &amax_backward::BACKWARD,
    &log_sum_exp::SUM_EXP,
    &log_sum_exp::FINISH,
    &log_sum_exp::BACKWARD,
    &scan::CUMSUM,
    &gated_scan::SCAN,
    &gated_scan::SUMMARY,
    &gated_scan::CARRY,
    &gated_scan::BACKWARD,
    &arg_extreme::ARG_EXTREME,
    &softmax::FORWARD,
    &softmax::BACKWARD,
    &layer_norm::FORWARD,
    &layer_norm::BACKWARD,
    &rms_norm::FORWARD,
    &rms_norm::BACKWARD,
    &attention::FORWARD,
    &attention::BACKWARD,
    &attention::BACKWARD_JOINED,
    &attention::MERGE,
    &cross_entropy::FORWARD,
    &cross_entropy::BACKWARD,
    &embedding::FORWARD,
    &embedding::BACKWARD,
    &embedding::BACKWARD_IN_LEAVES,
    &index::GATHER,
    &index::SCATTER_ADD,
    &one_hot::ONE_HOT,
    &triangular::TRIANGULAR,
    &sort::SORT,
    &sort_by_group::SORT_BY_GROUP,
    &overflow_check::CONTROL_WORD,
    &overflow_check::OVERFLOW_CHECK,
    &adamw::STEP,
    &sgd::STEP,
    &random::UNIFORM,
    &random::NORMAL,
    &random::DROPOUT,
    &rope::ROPE,
    &swiglu::BACKWARD,
];

/// All kernels, those of tables first.
pub static KERNELS: &[&Kernel] = &all_kernels();

const NUM_KERNELS: usize = TABLES[0].len() + TABLES[1].len() + TABLES[2].len() + OTHERS.len();

const fn all_kernels() -> [&'static Kernel; NUM_KERNELS] {
    let mut kernels = [OTHERS[0]; NUM_KERNELS];
    let (mut at, mut table) = (0, 0);
    while table < TABLES.len() {
        let mut row = 0;
        while row < TABLES[table].len() {
            kernels[at] = TABLES[table][row].0;
            (at, row) = (at + 1, row + 1);
        }
        table += 1;
    }
    let (_, others) = kernels.split_at_mut(at);
    others.copy_from_slice(OTHERS);
    kernels
}

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
