//! Concatenation of tensors along an unsharded dim.

use super::labels::{check_dim, check_num_tensors, common_dtype, dim_labels_with, linear_jointly, unsplit};
use super::slice::Slice;
use super::{Case, Input};
use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::op::{
    CanonicalForm, Cotangents, DTypes, ForwardContext, LocalTensors, Op, OutputLayouts, Vjp, unwind,
};
use shardgrad_dist::Result;
use shardgrad_kernels::DType;
use smallvec::smallvec;
use std::rc::Rc;

/// Concatenates tensors along a dim: `..m d!, ..m e! -> ..m f`, `a x0! c, a x1! c, .. -> a y c`.
///
/// One dtype of any kind. The dim must not be sharded. Linear in all arguments jointly. Gradient: the cotangent of an
/// argument is its range of g.
#[doc(alias = "cat")]
#[doc(alias = "concatenate")]
#[derive(Debug)]
pub struct Concat {
    signature: String,
    dim: usize,
    count: usize,
}

impl Concat {
    /// The concatenation of `count` tensors of `ndim` dims along dim `dim`.
    ///
    /// # Errors
    /// `Kind::Shape` if the dim is out of range or there are not 1 to 16 arguments.
    pub fn along(ndim: usize, dim: usize, count: usize) -> Result<Rc<dyn Op>> {
        check_dim("concat", ndim, dim)?;
        check_num_tensors("concat", count)?;
        let signature = if count == 2 && dim + 1 == ndim {
            "..m d!, ..m e! -> ..m f".to_string()
        } else {
            let parts: Vec<String> =
                (0..count).map(|i| dim_labels_with(ndim, dim, &format!("x{i}!"))).collect();
            format!("{} -> {}", parts.join(", "), dim_labels_with(ndim, dim, "y"))
        };
        Ok(Rc::new(Concat { signature, dim, count }))
    }
}

impl Op for Concat {
    fn name(&self) -> &'static str {
        "concat"
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        linear_jointly(self.count)
    }

    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::Exact
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        common_dtype(inputs)
    }

    fn default_outputs(&self, args: &[&Layout], dtypes: &[DType]) -> OutputLayouts {
        let mut shape = args[0].shape();
        shape[self.dim] = args.iter().map(|l| l.shape().get(self.dim).copied().unwrap_or(0)).sum();
        smallvec![unsplit(args[0], dtypes[0], &shape)]
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let mut out = local.output(0)?;
        let mut start = 0;
        for tensor in x {
            let end = start + tensor.view.shape[self.dim];
            let at = out.view.narrow(self.dim, start, end);
            out.write(local.rank, at, tensor)?;
            start = end;
        }
        Ok([out].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let (ndim, extent) = (cx.output_layouts[0].ndim(), cx.output_layouts[0].extent(self.dim));
        let extents: Vec<usize> = cx.input_layouts.iter().map(|l| l.extent(self.dim)).collect();
        cx.cotangents(|i| {
            let start: usize = extents[..i].iter().sum();
            let op = unwind(Slice::along(ndim, extent, self.dim, start..start + extents[i]));
            cx.cotangent(i, op, &[&cx.grad(0)])
        })
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |dim, shapes: &[&[usize]]| {
        let op = Concat::along(shapes[0].len(), dim, shapes.len()).expect("a dim of the case");
        Case::new(op, shapes.iter().map(|s| Input::real(s)).collect()).exact()
    };
    vec![
        case(1, &[&[5, 3], &[5, 2]]),
        case(0, &[&[3, 4], &[0, 4], &[2, 4]]),
        case(0, &[&[3]]),
        case(0, &[&[0, 2], &[0, 2]]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::value::Value;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn matches_concatenations_written_by_hand() {
        World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[2, 1], &[1i64, 2])?;
            let y = Tensor::from_host(rank, &[2, 2], &[3i64, 4, 5, 6])?;
            assert_eq!(Tensor::concat(&[&x, &y], 1).to_host::<i64>()?, [1, 3, 4, 2, 5, 6]);
            assert_eq!(Tensor::concat(&[&y, &y], 0).shape().as_slice(), [4, 2]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn dim_out_of_range_and_17_tensors_are_refused() {
        assert!(Concat::along(2, 2, 2).is_err());
        assert!(Concat::along(2, 0, 17).is_err());
    }
}
