//! The slices of a tensor along a dim, which disappears, and their transpose: tensors side by side along a new dim.

use super::labels::{check_count, check_dim, jointly, letter, letters_with, one_dtype, whole};
use super::{Case, Input};
use crate::context::Context;
use crate::infer::Inference;
use crate::layout::Layout;
use crate::op::{Cotangents, DTypes, Local, Op, Pieces, Vjp, infer_by_signature};
use crate::piece::Piece;
use crate::refusal::Refusal;
use crate::tensor::Tensor;
use shardgrad_dist::Result;
use shardgrad_kernels::DType;
use smallvec::SmallVec;
use std::rc::Rc;

/// `a b! c -> a c, a c, ..`: as many results as the dim, which must be whole, has elements; views, no element moves.
/// Any dtype. Linear. dx = the cotangents of all results side by side.
#[derive(Debug)]
pub struct Unbind {
    signature: String,
    ndim: usize,
    dim: usize,
    count: usize,
}

impl Unbind {
    /// The `count` slices along a dim of a tensor of `ndim` dims.
    ///
    /// # Errors
    /// Of kind `Kind::Shape` if there is no such dim, or it has no or more than 16 elements.
    pub fn along(ndim: usize, dim: usize, count: usize) -> Result<Rc<dyn Op>> {
        check_dim("unbind", ndim, dim)?;
        check_count("unbind", count)?;
        Ok(Unbind::of(ndim, dim, count))
    }

    fn of(ndim: usize, dim: usize, count: usize) -> Rc<dyn Op> {
        let whole = format!("{}!", letter(dim));
        let parts = vec![letters_with(ndim, dim, ""); count].join(", ");
        let signature = format!("{} -> {parts}", letters_with(ndim, dim, &whole));
        Rc::new(Unbind { signature, ndim, dim, count })
    }
}

impl Op for Unbind {
    fn name(&self) -> &'static str {
        "unbind"
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        Ok(SmallVec::from_elem(inputs[0], num_outputs))
    }

    fn forward(&self, _: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        debug_assert_eq!(x[0].view.shape[self.dim], self.count, "the op was made for this extent");
        Ok((0..self.count).map(|i| x[0].viewed(x[0].view.select(self.dim, i))).collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.each(|_| {
            let grads: Vec<Tensor> = (0..self.count).map(|i| cx.grad(i)).collect();
            let grads: Vec<&Tensor> = grads.iter().collect();
            let op = Stack::of(self.ndim - 1, self.dim, self.count);
            Tensor::apply_with(op, &grads, cx.goal(0))
        })
    }
}

/// `a c, a c, .. -> a b c`: a new dim, whole, with one slice per argument. One dtype, any. Linear jointly.
/// The cotangents are the slices of g.
#[derive(Debug)]
pub struct Stack {
    signature: String,
    dim: usize,
    count: usize,
}

impl Stack {
    /// `count` tensors of `ndim` dims along a new dim, counted in the result.
    ///
    /// # Errors
    /// Of kind `Kind::Shape` if the result has no such dim, or there are no or more than 16 arguments.
    pub fn along(ndim: usize, dim: usize, count: usize) -> Result<Rc<dyn Op>> {
        check_dim("stack", ndim + 1, dim)?;
        check_count("stack", count)?;
        Ok(Stack::of(ndim, dim, count))
    }

    fn of(ndim: usize, dim: usize, count: usize) -> Rc<dyn Op> {
        let parts = vec![letters_with(ndim + 1, dim, ""); count].join(", ");
        let signature = format!("{parts} -> {}", letters_with(ndim + 1, dim, letter(dim)));
        Rc::new(Stack { signature, dim, count })
    }
}

impl Op for Stack {
    fn name(&self) -> &'static str {
        "stack"
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        jointly(self.count)
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        one_dtype(inputs)
    }

    fn infer(
        &self,
        context: &Context,
        args: &[&Layout],
        dtypes: &[DType],
        want: &[Option<Layout>],
    ) -> Result<Rc<Inference>, Refusal> {
        if !want.is_empty() {
            return infer_by_signature(self, context, args, dtypes, want);
        }
        let mut shape = args[0].shape();
        if shape.len() >= self.dim {
            shape.insert(self.dim, self.count);
        }
        infer_by_signature(self, context, args, dtypes, &[whole(args[0], dtypes[0], &shape)])
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let mut out = local.output(0)?;
        for (i, piece) in x.iter().enumerate() {
            let at = out.view.select(self.dim, i);
            out.write(local.rank, at, piece)?;
        }
        Ok([out].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let op = Unbind::of(cx.output_layouts[0].ndim(), self.dim, self.count);
        let parts = Tensor::results(op, &[&cx.grad(0)]);
        cx.each(|i| parts[i].clone())
    }
}

pub(super) fn cases() -> Vec<Case> {
    let unbind = |dim: usize, input: Input| {
        let op = Unbind::of(input.shape().len(), dim, input.shape()[dim]);
        Case::fixed(op, vec![input]).exact()
    };
    let stack = |dim, count, shape: &[usize]| {
        Case::new(Stack::of(shape.len(), dim, count), vec![Input::real(shape); count]).exact()
    };
    vec![
        unbind(1, Input::real(&[5, 3])),
        unbind(2, Input::real(&[2, 5, 3, 2])),
        unbind(0, Input::index(&[2, 5], 9)),
        unbind(1, Input::real(&[1, 2, 1])),
        stack(1, 3, &[5, 3]),
        stack(0, 2, &[5]),
        stack(0, 2, &[]),
        unbind(1, Input::real(&[0, 2])),
        stack(1, 2, &[0, 3]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn slices_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 3], &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
            let columns = x.unbind(1);
            assert_eq!(columns.len(), 3);
            assert_eq!(columns[1].to_host::<f32>()?, [2.0, 5.0]);
            assert_eq!(x.unbind(0)[1].to_host::<f32>()?, [4.0, 5.0, 6.0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn what_cannot_be_unbound_is_refused() {
        assert!(Unbind::along(2, 2, 3).is_err());
        assert!(Unbind::along(2, 0, 17).is_err());
    }

    #[test]
    fn stacks_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2], &[1.0f32, 2.0])?;
            let y = Tensor::from_host(rank, &[2], &[3.0f32, 4.0])?;
            assert_eq!(Tensor::stack(&[&x, &y], 0).to_host::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
            assert_eq!(Tensor::stack(&[&x, &y], 1).to_host::<f32>()?, [1.0, 3.0, 2.0, 4.0]);
            Ok(())
        })
        .unwrap();
    }
}
