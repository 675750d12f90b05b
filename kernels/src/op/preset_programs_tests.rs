//! The GPU programs of the shapes of all presets: widths from 768 to 8192 and vocabularies up to 152,064, compiled for each generation of
//! GPUs, without spills and with room for two blocks. Nothing runs. Without `SHARDGRAD_CARDS=all`, a few of them.

use crate::buffer::Buffer;
use crate::dtype::DType;
use crate::gpu::shim;
use crate::kernel::{Arg, ArgMut, Kernel, Launch, Scalar};
use crate::null::Null;
use crate::op::{attention, cross_entropy, embedding, layer_norm, rms_norm, softmax};
use crate::strides::Strides;

/// Widths of models, widths of hidden layers that norms do not see left out.
const WIDTHS: [usize; 10] = [768, 896, 1024, 1280, 1600, 2048, 2880, 4096, 5120, 8192];
const VOCABULARIES: [usize; 7] = [32_000, 32_768, 50_257, 50_304, 128_256, 151_936, 152_064];
/// Channels of a head, and query heads per key head.
const HEADS: [[usize; 2]; 8] = [[64, 1], [64, 4], [64, 7], [64, 8], [128, 1], [128, 2], [128, 4], [128, 8]];
const ROWS: usize = 8192;

/// An operand of a launch: its dtype, `None` for that of the model, and its shape.
type Operand = (Option<DType>, Vec<usize>);

/// A launch of a kernel, without memory.
struct Shape {
    kernel: &'static Kernel,
    inputs: Vec<Operand>,
    outputs: Vec<Operand>,
    scalars: Vec<Scalar>,
}

impl Shape {
    /// Compiles the programs of the launch for each generation of GPUs.
    fn check(&self, dtype: DType) {
        let memory = Null::backend();
        let make = |operands: &[Operand]| -> Vec<(Buffer, DType, Strides)> {
            let of = |(own, shape): &Operand| {
                let (dtype, view) = (own.unwrap_or(dtype), Strides::contiguous(shape));
                (memory.alloc(view.numel() * dtype.size()).unwrap(), dtype, view)
            };
            operands.iter().map(of).collect()
        };
        let (inputs, mut outputs) = (make(&self.inputs), make(&self.outputs));
        let inputs: Vec<Arg<'_>> =
            inputs.iter().map(|(buffer, dtype, view)| Arg { buffer, dtype: *dtype, view }).collect();
        let mut outputs: Vec<ArgMut<'_>> =
            outputs.iter_mut().map(|(buffer, dtype, view)| ArgMut { buffer, dtype: *dtype, view }).collect();
        let launch = Launch { inputs: &inputs, outputs: &mut outputs, scalars: &self.scalars };
        shim::check_programs(self.kernel, &launch)
            .unwrap_or_else(|e| panic!("{} {dtype} {:?}: {e}", self.kernel.name, self.inputs[0].1));
    }
}

fn own(shape: &[usize]) -> Operand {
    (None, shape.to_vec())
}

/// An operand in the accumulator of f32 and narrower dtypes.
fn wide(shape: &[usize]) -> Operand {
    (Some(DType::F32), shape.to_vec())
}

fn index(shape: &[usize]) -> Operand {
    (Some(DType::I64), shape.to_vec())
}

/// Norms forward and backward, with and without a residual gradient, with the gradients of weights in the dtype of the model and in f32.
fn norms(d: usize) -> Vec<Shape> {
    let (x, w, statistic) = (own(&[ROWS, d]), own(&[d]), wide(&[ROWS]));
    let eps = vec![Scalar::Real(1e-5)];
    let mut shapes = vec![
        Shape {
            kernel: &layer_norm::FORWARD,
            inputs: vec![x.clone(), w.clone(), w.clone()],
            outputs: vec![x.clone(), statistic.clone(), statistic.clone()],
            scalars: eps.clone(),
        },
        Shape {
            kernel: &rms_norm::FORWARD,
            inputs: vec![x.clone(), w.clone()],
            outputs: vec![x.clone(), statistic.clone()],
            scalars: eps,
        },
    ];
    for (adds, dw) in [(0, own(&[d])), (1, own(&[d])), (0, wide(&[d])), (1, wide(&[d]))] {
        let residual = std::iter::repeat_n(x.clone(), adds);
        let of = |statistics: usize| {
            let statistics = std::iter::repeat_n(statistic.clone(), statistics);
            [x.clone(), w.clone()].into_iter().chain(statistics).chain([x.clone()]).chain(residual.clone())
        };
        shapes.push(Shape {
            kernel: &layer_norm::BACKWARD,
            inputs: of(2).collect(),
            outputs: vec![x.clone(), dw.clone(), dw.clone()],
            scalars: vec![],
        });
        shapes.push(Shape {
            kernel: &rms_norm::BACKWARD,
            inputs: of(1).collect(),
            outputs: vec![x.clone(), dw],
            scalars: vec![],
        });
    }
    shapes
}

fn embedding_gradient(v: usize, d: usize) -> Shape {
    Shape {
        kernel: &embedding::BACKWARD,
        inputs: vec![index(&[ROWS]), own(&[ROWS, d])],
        outputs: vec![own(&[v, d])],
        scalars: vec![Scalar::Int(0), Scalar::Int(v as i64)],
    }
}

/// Rows of a vocabulary: softmax and cross-entropy.
fn vocabulary(v: usize) -> Vec<Shape> {
    let (z, value) = (own(&[ROWS, v]), wide(&[ROWS]));
    let scalars = vec![Scalar::Int(0), Scalar::Int(v as i64)];
    let of = |kernel, inputs, outputs, scalars| Shape { kernel, inputs, outputs, scalars };
    vec![
        of(&softmax::FORWARD, vec![z.clone()], vec![z.clone()], vec![]),
        of(&softmax::BACKWARD, vec![z.clone(), z.clone()], vec![z.clone()], vec![]),
        of(
            &cross_entropy::FORWARD,
            vec![z.clone(), index(&[ROWS])],
            vec![value.clone(), value.clone()],
            scalars.clone(),
        ),
        of(
            &cross_entropy::BACKWARD,
            vec![index(&[ROWS]), value.clone(), value.clone(), value],
            vec![z],
            scalars,
        ),
    ]
}

fn attention([c, r]: [usize; 2]) -> [Shape; 2] {
    let (q, k, lse) = (own(&[2, 4096, 8, r, c]), own(&[2, 4096, 8, c]), wide(&[2, 4096, 8, r]));
    let scalars = vec![Scalar::Real(0.1), Scalar::Int(1), Scalar::Int(0), Scalar::Int(0)];
    [
        Shape {
            kernel: &attention::FORWARD,
            inputs: vec![q.clone(), k.clone(), k.clone()],
            outputs: vec![q.clone(), lse.clone()],
            scalars: scalars.clone(),
        },
        Shape {
            kernel: &attention::BACKWARD,
            inputs: vec![q.clone(), k.clone(), k.clone(), q.clone(), lse, q.clone()],
            outputs: vec![q, k.clone(), k],
            scalars,
        },
    ]
}

#[test]
fn programs_of_all_presets_fit_registers() {
    if !shim::is_full() {
        // The widest and the odd norms with a residual, and the largest embedding.
        norms(8192)
            .iter()
            .rev()
            .take(2)
            .chain(norms(1600).iter().rev().take(1))
            .for_each(|s| s.check(DType::BF16));
        return embedding_gradient(152_064, 8192).check(DType::BF16);
    }
    for dtype in [DType::BF16, DType::F32] {
        for d in WIDTHS {
            norms(d).iter().for_each(|shape| shape.check(dtype));
            for v in VOCABULARIES {
                embedding_gradient(v, d).check(dtype);
            }
        }
        VOCABULARIES.into_iter().flat_map(vocabulary).for_each(|shape| shape.check(dtype));
    }
    HEADS.into_iter().flat_map(attention).for_each(|shape| shape.check(DType::BF16));
}
