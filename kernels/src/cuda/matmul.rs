//! Batched matrix products of a launch plan on cuBLASLt. Operands with strides that cuBLASLt cannot express are copied first;
//! epilogues and products for which it has no algorithm run as separate kernels.

use super::cublaslt::{EpilogueOperands, MatmulPlanner, MatmulProblem};
use super::driver::Stream;
use super::launch::element_address;
use super::memory::CachingAllocator;
use super::operand::Operand;
use crate::buffer::Buffer;
use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::{Epilogue, Matmul};
use crate::kernel::{Arg, ArgMut, Kernel, Launch, Scalar};
use crate::op::batched_matmul::{BATCHED_MATMUL, TILED_MATMUL};
use crate::op::binary::ADD;
use crate::op::copy::COPY;
use crate::op::fill::FILL;
use crate::op::reduce::SUM;
use crate::op::unary::GELU;
use crate::strides::Strides;
use cudarc::cublaslt::sys::cublasLtEpilogue_t;
use std::sync::{Arc, Mutex, PoisonError};

/// Launches a kernel on the stream of the products.
type Run<'a> = &'a dyn Fn(&Kernel, &mut Launch<'_>) -> Result<(), KernelError>;

/// Runs the matrix products of a rank: its allocator, plans, workspace and stream.
pub(super) struct MatmulRunner<'a> {
    pub(super) memory: &'a Arc<CachingAllocator>,
    pub(super) planner: &'a Mutex<MatmulPlanner>,
    pub(super) workspace: &'a Buffer,
    pub(super) stream: &'a Stream,
    pub(super) run: Run<'a>,
}

/// The alignment in bytes that cuBLASLt requires of bias and auxiliary matrices, and the number of which their columns must be a
/// multiple.
const EPILOGUE_ALIGNMENT: u64 = 16;
const EPILOGUE_COLUMNS_MULTIPLE: usize = 8;

impl MatmulRunner<'_> {
    /// Runs a product of a plan: with a fused epilogue if cuBLASLt has one, else with separate kernels.
    pub(super) fn run(&self, launch: &mut Launch<'_>, product: Matmul) -> Result<(), KernelError> {
        if product.epilogue == Epilogue::Plain {
            return self.run_plain(launch, product);
        }
        if self.run_fused(launch, product)? { Ok(()) } else { self.run_unfused(launch, product) }
    }

    fn submit(
        &self,
        problem: MatmulProblem,
        addresses: ([u64; 3], EpilogueOperands),
    ) -> Result<(), KernelError> {
        let mut planner = self.planner.lock().unwrap_or_else(PoisonError::into_inner);
        planner.run(self.stream, problem, addresses, self.workspace)
    }

    /// Runs product and epilogue in one cuBLASLt call. Returns false, having run nothing, if cuBLASLt does not support the epilogue.
    fn run_fused(&self, launch: &Launch<'_>, product: Matmul) -> Result<bool, KernelError> {
        let (a, b, c) = (launch.inputs[product.a], launch.inputs[product.b], &launch.outputs[product.c]);
        if c.view.numel() == 0 || a.view.shape[2] == 0 {
            return Ok(false);
        }
        if matches!(product.epilogue, Epilogue::BiasGelu { .. }) && c.dtype == DType::F64 {
            // cuBLASLt 13.1 computes gelu of f64 with the accuracy of f32.
            return Ok(false);
        }
        let (epilogue, epilogue_operands) = epilogue_operands(launch, product.epilogue);
        let [a_view, b_view, c_view] = merge_batch([a.view, b.view, c.view]);
        let is_aligned = [epilogue_operands.bias, epilogue_operands.aux]
            .iter()
            .all(|at| at.is_multiple_of(EPILOGUE_ALIGNMENT))
            && c_view.shape[2].is_multiple_of(EPILOGUE_COLUMNS_MULTIPLE);
        // cuBLASLt sums over a single matrix only.
        let sums = matches!(product.epilogue, Epilogue::BiasGrad { .. });
        let address = element_address(c.buffer, &c_view, c.dtype);
        let Some(operand) = Operand::row_major(&c_view, address).filter(|_| is_aligned) else {
            return Ok(false);
        };
        if sums && c_view.shape[0] != 1 {
            return Ok(false);
        }
        let residual = match epilogue_operands.residual {
            0 => None,
            address => Operand::row_major(&c_view, address),
        };
        let a = self.readable(&Arg { view: &a_view, ..a })?;
        let b = self.readable(&Arg { view: &b_view, ..b })?;
        let problem = MatmulProblem {
            dtype: c.dtype,
            extents: [c_view.shape[0], c_view.shape[1], c_view.shape[2], a_view.shape[2]],
            a: a.operand,
            b: b.operand,
            c: operand,
            residual,
            epilogue,
        };
        match self.submit(problem, ([a.address, b.address, address], epilogue_operands)) {
            Err(KernelError::Unsupported { .. }) => Ok(false),
            done => done.map(|()| true),
        }
    }

    /// Runs the product alone, then its epilogue as separate kernels.
    fn run_unfused(&self, launch: &mut Launch<'_>, product: Matmul) -> Result<(), KernelError> {
        let (dtype, shape) = (launch.outputs[product.c].dtype, launch.outputs[product.c].view.shape.clone());
        let whole = Strides::contiguous(&shape);
        let spread = |x: &Strides| Strides::new(shape.clone(), [0, 0, 1][..].into(), x.offset);
        let mut bare = self.memory.alloc(whole.numel() * dtype.size())?;
        let factors = [launch.inputs[product.a], launch.inputs[product.b]];
        let to = ArgMut { buffer: &mut bare, dtype, view: &whole };
        self.launch(&BATCHED_MATMUL, &factors, to, &[])?;
        let bare = Arg { buffer: &bare, dtype, view: &whole };
        match product.epilogue {
            Epilogue::Plain => self.launch(&COPY, &[bare], reborrow(&mut launch.outputs[product.c]), &[]),
            Epilogue::Bias { bias } => {
                let bias = launch.inputs[bias];
                let spread = spread(bias.view);
                let terms = [bare, Arg { view: &spread, ..bias }];
                self.launch(&ADD, &terms, reborrow(&mut launch.outputs[product.c]), &[])
            }
            Epilogue::Add { bias: None, residual } => {
                let terms = [bare, launch.inputs[residual]];
                self.launch(&ADD, &terms, reborrow(&mut launch.outputs[product.c]), &[])
            }
            Epilogue::Add { bias: Some(bias), residual } => {
                let bias = launch.inputs[bias];
                let spread = spread(bias.view);
                let mut layer = self.memory.alloc(whole.numel() * dtype.size())?;
                let to = ArgMut { buffer: &mut layer, dtype, view: &whole };
                self.launch(&ADD, &[bare, Arg { view: &spread, ..bias }], to, &[])?;
                let terms = [Arg { buffer: &layer, dtype, view: &whole }, launch.inputs[residual]];
                self.launch(&ADD, &terms, reborrow(&mut launch.outputs[product.c]), &[])
            }
            Epilogue::BiasGelu { bias, pre_gelu } => {
                let bias = launch.inputs[bias];
                let spread = spread(bias.view);
                let terms = [bare, Arg { view: &spread, ..bias }];
                let [c, pre_gelu] = two_outputs(launch, product.c, pre_gelu);
                self.launch(&ADD, &terms, reborrow(pre_gelu), &[])?;
                self.launch(&GELU, &[as_input(pre_gelu)], reborrow(c), &[])
            }
            Epilogue::BiasGrad { sums } => {
                let b = launch.inputs[product.b];
                let [c, sums] = two_outputs(launch, product.c, sums);
                self.launch(&COPY, &[bare], reborrow(c), &[])?;
                self.column_sums(&b, sums)
            }
        }
    }

    /// Launches the column sums of a batch: sums_j = the sum of x_gij over g and i.
    fn column_sums(&self, x: &Arg<'_>, sums: &mut ArgMut<'_>) -> Result<(), KernelError> {
        let view = x.view.permute(&[2, 0, 1]);
        self.launch(&SUM, &[Arg { view: &view, ..*x }], reborrow(sums), &[Scalar::Int(2), Scalar::Real(1.0)])
    }

    fn launch(
        &self,
        kernel: &Kernel,
        inputs: &[Arg<'_>],
        output: ArgMut<'_>,
        scalars: &[Scalar],
    ) -> Result<(), KernelError> {
        (self.run)(kernel, &mut Launch { inputs, outputs: &mut [output], scalars })
    }

    /// Runs a batched product without epilogue: by cuBLASLt, else by a kernel.
    fn run_plain(&self, launch: &mut Launch<'_>, product: Matmul) -> Result<(), KernelError> {
        match self.run_by_library(launch, product) {
            Err(KernelError::Unsupported { .. }) => {
                let inputs = [launch.inputs[product.a], launch.inputs[product.b]];
                self.launch(&TILED_MATMUL, &inputs, reborrow(&mut launch.outputs[product.c]), &[])
            }
            done => done,
        }
    }

    /// Runs a batched product by cuBLASLt, through copies of operands and results that cuBLASLt cannot address.
    fn run_by_library(&self, launch: &mut Launch<'_>, product: Matmul) -> Result<(), KernelError> {
        let (a, b) = (launch.inputs[product.a], launch.inputs[product.b]);
        let c = &mut launch.outputs[product.c];
        let (extents, k) = (c.view.shape.clone(), a.view.shape[2]);
        if extents.contains(&0) {
            return Ok(());
        }
        if k == 0 {
            let mut outputs = [ArgMut { buffer: &mut *c.buffer, dtype: c.dtype, view: c.view }];
            let scalars = [Scalar::Real(0.0)];
            return (self.run)(&FILL, &mut Launch { inputs: &[], outputs: &mut outputs, scalars: &scalars });
        }
        let [a_view, b_view, c_view] = merge_batch([a.view, b.view, c.view]);
        let a = self.readable(&Arg { view: &a_view, ..a })?;
        let b = self.readable(&Arg { view: &b_view, ..b })?;
        let size = c.dtype.size();
        let own = Operand::from_view(&c_view, element_address(c.buffer, &c_view, c.dtype));
        let mut spare = match own {
            Some(_) => None,
            None => Some(self.memory.alloc(c_view.numel() * size)?),
        };
        let whole = Strides::contiguous(&c_view.shape);
        let (operand, address) = match &spare {
            None => (own, element_address(c.buffer, &c_view, c.dtype)),
            Some(buffer) => {
                let address = element_address(buffer, &whole, c.dtype);
                (Operand::from_view(&whole, address), address)
            }
        };
        let problem = MatmulProblem {
            dtype: c.dtype,
            extents: [c_view.shape[0], c_view.shape[1], c_view.shape[2], k],
            a: a.operand,
            b: b.operand,
            c: operand.expect("row-major memory can be described"),
            residual: None,
            epilogue: cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
        };
        self.submit(problem, ([a.address, b.address, address], EpilogueOperands::default()))?;
        if let Some(buffer) = spare.take() {
            let inputs = [Arg { buffer: &buffer, dtype: c.dtype, view: &whole }];
            let mut outputs = [ArgMut { buffer: &mut *c.buffer, dtype: c.dtype, view: &c_view }];
            (self.run)(&COPY, &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[] })?;
        }
        Ok(())
    }

    /// Returns an operand that cuBLASLt can read: x itself or a contiguous copy (of one matrix if the batch stride is 0).
    fn readable(&self, x: &Arg<'_>) -> Result<ReadableOperand, KernelError> {
        let address = element_address(x.buffer, x.view, x.dtype);
        if let Some(operand) = Operand::from_view(x.view, address) {
            return Ok(ReadableOperand { operand, address, _copy: None });
        }
        let is_shared = x.view.strides[0] == 0;
        let from = if is_shared { x.view.narrow(0, 0, 1) } else { x.view.clone() };
        let to = Strides::contiguous(&from.shape);
        let mut buffer = self.memory.alloc(from.numel() * x.dtype.size())?;
        let inputs = [Arg { view: &from, ..*x }];
        let mut outputs = [ArgMut { buffer: &mut buffer, dtype: x.dtype, view: &to }];
        (self.run)(&COPY, &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[] })?;
        let address = element_address(&buffer, &to, x.dtype);
        let mut seen = to.geometry();
        if is_shared {
            seen.strides[0] = 0;
        }
        let operand = Operand::from_view(&seen.into(), address).expect("row-major memory can be described");
        Ok(ReadableOperand { operand, address, _copy: Some(buffer) })
    }
}

/// An operand that cuBLASLt can read, with the copy that holds it, if one was made.
struct ReadableOperand {
    operand: Operand,
    address: u64,
    _copy: Option<Buffer>,
}

/// Merges a batch with one shared b into one product of more rows, if the rows of a and c are evenly spaced across the batch.
fn merge_batch([a, b, c]: [&Strides; 3]) -> [Strides; 3] {
    let joined = |x: &Strides| {
        let is_mergeable = x.strides[0] == x.strides[1] * x.shape[1];
        let shape = [1, x.shape[0] * x.shape[1], x.shape[2]];
        is_mergeable
            .then(|| Strides::new(shape[..].into(), [0, x.strides[1], x.strides[2]][..].into(), x.offset))
    };
    if b.strides[0] == 0
        && let (Some(a), Some(c)) = (joined(a), joined(c))
    {
        return [a, b.narrow(0, 0, 1), c];
    }
    [a.clone(), b.clone(), c.clone()]
}

/// Returns the cuBLASLt epilogue, and the addresses of its operands.
fn epilogue_operands(launch: &Launch<'_>, epilogue: Epilogue) -> (cublasLtEpilogue_t, EpilogueOperands) {
    use cublasLtEpilogue_t as E;
    let input =
        |i: usize| element_address(launch.inputs[i].buffer, launch.inputs[i].view, launch.inputs[i].dtype);
    let output =
        |i: usize| element_address(launch.outputs[i].buffer, launch.outputs[i].view, launch.outputs[i].dtype);
    let at = |bias, aux| EpilogueOperands { bias, aux, residual: 0 };
    match epilogue {
        Epilogue::Plain => (E::CUBLASLT_EPILOGUE_DEFAULT, EpilogueOperands::default()),
        Epilogue::Bias { bias } => (E::CUBLASLT_EPILOGUE_BIAS, at(input(bias), 0)),
        Epilogue::Add { bias, residual } => {
            let epilogue = bias.map_or(E::CUBLASLT_EPILOGUE_DEFAULT, |_| E::CUBLASLT_EPILOGUE_BIAS);
            (epilogue, EpilogueOperands { bias: bias.map_or(0, input), aux: 0, residual: input(residual) })
        }
        Epilogue::BiasGelu { bias, pre_gelu } => {
            (E::CUBLASLT_EPILOGUE_GELU_AUX_BIAS, at(input(bias), output(pre_gelu)))
        }
        // cuBLASLt is column-major: its operand a is b here.
        Epilogue::BiasGrad { sums } => (E::CUBLASLT_EPILOGUE_BGRADA, at(output(sums), 0)),
    }
}

/// Reborrows an output for another launch.
fn reborrow<'a>(y: &'a mut ArgMut<'_>) -> ArgMut<'a> {
    ArgMut { buffer: &mut *y.buffer, dtype: y.dtype, view: y.view }
}

/// Returns a written output as an input.
fn as_input<'a>(y: &'a ArgMut<'_>) -> Arg<'a> {
    Arg { buffer: &*y.buffer, dtype: y.dtype, view: y.view }
}

fn two_outputs<'s, 'a>(launch: &'s mut Launch<'a>, i: usize, j: usize) -> [&'s mut ArgMut<'a>; 2] {
    launch.outputs.get_disjoint_mut([i, j]).expect("two outputs of a plan")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_with_a_shared_matrix_becomes_one_product() {
        let a = Strides::contiguous(&[4, 6, 10]);
        let b = Strides::contiguous(&[10, 30]).broadcast(&[4, 10, 30]).unwrap();
        let c = Strides::contiguous(&[4, 6, 30]);
        let [x, y, z] = merge_batch([&a, &b, &c]);
        assert_eq!(
            (x.shape[..].to_vec(), y.shape[..].to_vec(), z.shape[..].to_vec()),
            (vec![1, 24, 10], vec![1, 10, 30], vec![1, 24, 30])
        );
        let apart = c.permute(&[0, 1, 2]).narrow(1, 0, 5);
        let [x, _, _] = merge_batch([&a.narrow(1, 0, 5), &b, &apart]);
        assert_eq!(x.shape[..], [4, 5, 10]);
    }
}
