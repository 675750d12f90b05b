//! y_n = row index_n of a table.

use super::{Case, Input};
use crate::layout::Layout;
use crate::op::{Cotangents, DTypes, Keeps, Local, Op, Pieces, Vjp, common_float};
use crate::piece::Piece;
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Result};
use shardgrad_kernels::op::embedding::{BACKWARD, FORWARD};
use shardgrad_kernels::{DType, Scalar};
use smallvec::SmallVec;
use std::rc::Rc;

/// `[v] d, ..m -> ..m d` on a table (any float) and indices (i64, each in 0..v). Linear in the table.
///
/// A rank whose range of v lacks a row gives zeros for it, so a table split over v leaves a pending sum, of which one
/// term is not zero. dtable_i = the sum of g_n over all n with index_n = i.
#[derive(Debug)]
pub struct Embedding;

/// `..m, ..m d -> [v] d`: the sum of the cotangents of each row, split as the table.
#[derive(Debug)]
struct EmbeddingBackward;

/// Where this rank's rows begin, and how many there are in all.
fn rows(local: &Local<'_>) -> [Scalar; 2] {
    let (count, range) = local.label("v");
    [Scalar::Int(range.start as i64), Scalar::Int(count as i64)]
}

/// Refuses indices that are no i64.
pub(super) fn check_index(dtype: DType) -> Result<()> {
    if dtype == DType::I64 {
        return Ok(());
    }
    Err(Error::new(Kind::DType, format!("indices of {dtype}"))
        .detail("help", "indices are i64: ids.cast(DType::I64)"))
}

impl Op for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn signature(&self) -> &str {
        "[v] d, ..m -> ..m d"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn differentiable(&self) -> &'static [bool] {
        &[true, false]
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[1], outputs: &[] }
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        check_index(inputs[1])?;
        Ok(SmallVec::from_slice(&[common_float(&inputs[..1])?]))
    }

    fn volume(&self, _: usize, _: &[&Layout], outputs: &[Layout]) -> usize {
        // Not the table, of which it reads as much.
        outputs[0].numel()
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let x = local.contiguous(x)?;
        local.launch(&FORWARD, &[&x[0], &x[1]], &rows(local))
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|i| Tensor::apply_with(Rc::new(EmbeddingBackward), &[cx.input(1), &cx.grad(0)], cx.goal(i)))
    }
}

impl Op for EmbeddingBackward {
    fn name(&self) -> &'static str {
        "embedding_backward"
    }

    fn signature(&self) -> &str {
        "..m, ..m d -> [v] d"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[1]]
    }

    fn differentiable(&self) -> &'static [bool] {
        &[false, true]
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        Ok(inputs[1..].into())
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let x = local.contiguous(x)?;
        local.launch(&BACKWARD, &[&x[0], &x[1]], &rows(local))
    }
}

pub(super) fn cases() -> Vec<Case> {
    let op = Rc::new(Embedding);
    vec![
        Case::new(op.clone(), vec![Input::real(&[7, 4]), Input::index(&[5], 7)]).exact(),
        Case::new(op.clone(), vec![Input::real(&[7, 3]), Input::index(&[2, 5], 7)]).exact(),
        Case::fixed(op, vec![Input::real(&[3, 2]), Input::index(&[0], 3)]).exact(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn rows_by_hand() {
        World::run(Mesh::single(), |rank| {
            let table = Tensor::from_host(rank, &[3, 2], &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
            let index = Tensor::from_host(rank, &[2, 1], &[2i64, 0])?;
            assert_eq!(table.embedding(&index).to_host::<f32>()?, [5.0, 6.0, 1.0, 2.0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn an_index_beyond_the_table_is_an_error_that_names_it() {
        let error = World::run(Mesh::single(), |rank| {
            let table = Tensor::from_host(rank, &[3, 2], &[0.0f32; 6])?;
            let _ = table.embedding(&Tensor::from_host(rank, &[2], &[2i64, 3])?);
            Ok(())
        })
        .unwrap_err();
        assert!(error.to_string().contains("index 3 at position 1 is outside of 0..3"), "{error}");
    }
}
