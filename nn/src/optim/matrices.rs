//! The matrices of parameters, each whole on one rank: for update rules that need all elements of a matrix.

use crate::module::param::Param;
use shardgrad_tensor::training_step::matrix_owners::{MatrixOwners, MatrixStack, OwnedMatrix};
use shardgrad_tensor::{Result, Tensor};

/// A whole matrix of a parameter, on the rank that computes with it.
#[derive(Clone, Debug)]
pub struct Matrix<'a> {
    /// The parameter.
    pub param: &'a Param,
    /// The position among the matrices of the parameter: 0, or the number of an expert.
    pub index: usize,
    /// The values, `[rows, columns]` as in files, on a mesh without axes: ops on them never communicate.
    pub value: Tensor,
    /// The number of inputs of the layer: columns where files hold `[out, in]`, as in PyTorch, and rows elsewhere.
    pub fan_in: usize,
    /// The number of outputs of the layer.
    pub fan_out: usize,
}

/// Returns the rows and columns of the matrices of a parameter in files, `None` for vectors and scalars.
pub(super) fn matrix_shape(param: &Param) -> Option<[usize; 2]> {
    match param.file_shape()[..] {
        [.., rows, columns] => Some([rows, columns]),
        _ => None,
    }
}

/// Returns the numbers of inputs and outputs of the layer that multiplies by matrices of this shape.
pub(super) fn fans(param: &Param, [rows, columns]: [usize; 2]) -> [usize; 2] {
    if param.is_transposed_in_files() { [columns, rows] } else { [rows, columns] }
}

/// [`Optimizer::map_matrices`](super::Optimizer::map_matrices).
#[track_caller]
pub(super) fn map_matrices(
    params: &[(&Param, Tensor)],
    rule: &mut dyn FnMut(Matrix<'_>) -> Result<Tensor>,
) -> Result<Vec<Tensor>> {
    let Some((_, first)) = params.first() else { return Ok(Vec::new()) };
    let (rank, dtype) = (first.rank().clone(), first.dtype());
    let ordered: Vec<Tensor> =
        params.iter().map(|(param, tensor)| param.permute_to_file_order(tensor.clone())).collect();
    let stack = |((param, _), tensor): (&(&Param, Tensor), &Tensor)| {
        MatrixStack::new(tensor.layout(), &param.file_shape())
            .map_err(|e| e.detail("parameter", param.name()))
    };
    let stacks = params.iter().zip(&ordered).map(stack).collect::<Result<Vec<MatrixStack>>>()?;
    let owners = MatrixOwners::assign(&rank, stacks);
    let owned = owners.gather(&ordered)?;
    drop(ordered);
    let mut results = Vec::with_capacity(owned.len());
    for OwnedMatrix { tensor, index, matrix: value } in owned {
        let param = params[tensor].0;
        let [fan_in, fan_out] = fans(param, [value.layout().extent(0), value.layout().extent(1)]);
        results.push(rule(Matrix { param, index, value, fan_in, fan_out })?);
    }
    let scattered = owners.scatter(dtype, &results)?;
    params.iter().zip(scattered).map(|((param, _), result)| param.permute_from_file_order(result)).collect()
}
