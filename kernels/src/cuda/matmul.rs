//! Stacks of products as plans ask for them: operands copied where the library has no words for their strides, and endings by
//! kernels of our own where it has no algorithm for them.

use super::cublaslt::{EpilogueOperands, MatmulDesc, MatmulPlanner};
use super::driver::Stream;
use super::launch::place;
use super::memory::Memory;
use super::operand::Operand;
use crate::buffer::Buffer;
use crate::dtype::DType;
use crate::error::KernelError;
use crate::gpu::{Epilogue, Matmul};
use crate::kernel::{Arg, ArgMut, Kernel, Launch, Scalar};
use crate::op::batched_matmul::BATCHED_MATMUL;
use crate::op::binary::ADD;
use crate::op::copy::COPY;
use crate::op::fill::FILL;
use crate::op::reduce::SUM;
use crate::op::unary::GELU;
use crate::strides::Strides;
use cudarc::cublaslt::sys::cublasLtEpilogue_t;
use std::sync::{Arc, Mutex, PoisonError};

/// Runs a kernel on the stream of the products.
type Run<'a> = &'a dyn Fn(&Kernel, &mut Launch<'_>) -> Result<(), KernelError>;

/// What products of a rank are made with.
pub(super) struct MatmulRunner<'a> {
    pub(super) memory: &'a Arc<Memory>,
    pub(super) planner: &'a Mutex<MatmulPlanner>,
    pub(super) workspace: &'a Buffer,
    pub(super) stream: &'a Stream,
    pub(super) run: Run<'a>,
}

/// Bytes to whose multiples the library wants what lies epilogue_operands a product to begin, and elements of which its lines have to be
/// multiples.
const BESIDE_BYTES: u64 = 16;
const BESIDE_ELEMENTS: usize = 8;

impl MatmulRunner<'_> {
    /// A product as a plan asks for it.
    pub(super) fn product(&self, launch: &mut Launch<'_>, product: Matmul) -> Result<(), KernelError> {
        if product.epilogue == Epilogue::Plain {
            return self.plain(launch, product);
        }
        if self.together(launch, product)? { Ok(()) } else { self.apart(launch, product) }
    }

    fn give(&self, task: MatmulDesc, addresses: ([u64; 3], EpilogueOperands)) -> Result<(), KernelError> {
        let mut planner = self.planner.lock().unwrap_or_else(PoisonError::into_inner);
        planner.run(self.stream, task, addresses, self.workspace)
    }

    /// Matmul and epilogue in one call of the library; false, and nothing is done, where it has none.
    fn together(&self, launch: &Launch<'_>, product: Matmul) -> Result<bool, KernelError> {
        let (a, b, c) = (launch.inputs[product.a], launch.inputs[product.b], &launch.outputs[product.c]);
        if c.view.numel() == 0 || a.view.shape[2] == 0 {
            return Ok(false);
        }
        if matches!(product.epilogue, Epilogue::BiasGelu { .. }) && c.dtype == DType::F64 {
            // The library's gelu of f64 is as good as one of f32 (cuBLASLt 13.1).
            return Ok(false);
        }
        let (epilogue, epilogue_operands) = epilogue_operands(launch, product.epilogue);
        let [a_view, b_view, c_view] = as_one([a.view, b.view, c.view]);
        let lies = [epilogue_operands.columns, epilogue_operands.whole]
            .iter()
            .all(|at| at.is_multiple_of(BESIDE_BYTES))
            && c_view.shape[2].is_multiple_of(BESIDE_ELEMENTS);
        // Sums run over one matrix there.
        let sums = matches!(product.epilogue, Epilogue::SumsOfB { .. });
        let address = place(c.buffer, &c_view, c.dtype);
        let Some(described) = Operand::row_major(&c_view, address).filter(|_| lies) else { return Ok(false) };
        if sums && c_view.shape[0] != 1 {
            return Ok(false);
        }
        let added = match epilogue_operands.added {
            0 => None,
            address => Operand::row_major(&c_view, address),
        };
        let a = self.readable(&Arg { view: &a_view, ..a })?;
        let b = self.readable(&Arg { view: &b_view, ..b })?;
        let task = MatmulDesc {
            dtype: c.dtype,
            extents: [c_view.shape[0], c_view.shape[1], c_view.shape[2], a_view.shape[2]],
            a: a.described,
            b: b.described,
            c: described,
            added,
            epilogue,
        };
        match self.give(task, ([a.address, b.address, address], epilogue_operands)) {
            Err(KernelError::Unsupported { .. }) => Ok(false),
            done => done.map(|()| true),
        }
    }

    /// The product by itself, and its epilogue by kernels of our own.
    fn apart(&self, launch: &mut Launch<'_>, product: Matmul) -> Result<(), KernelError> {
        let (dtype, shape) = (launch.outputs[product.c].dtype, launch.outputs[product.c].view.shape.clone());
        let whole = Strides::contiguous(&shape);
        let spread = |x: &Strides| Strides::new(shape.clone(), [0, 0, 1][..].into(), x.offset);
        let mut bare = self.memory.alloc(whole.numel() * dtype.size())?;
        let factors = [launch.inputs[product.a], launch.inputs[product.b]];
        let to = ArgMut { buffer: &mut bare, dtype, view: &whole };
        self.one(&BATCHED_MATMUL, &factors, to, &[])?;
        let bare = Arg { buffer: &bare, dtype, view: &whole };
        match product.epilogue {
            Epilogue::Plain => self.one(&COPY, &[bare], again(&mut launch.outputs[product.c]), &[]),
            Epilogue::Bias { bias } => {
                let bias = launch.inputs[bias];
                let spread = spread(bias.view);
                let terms = [bare, Arg { view: &spread, ..bias }];
                self.one(&ADD, &terms, again(&mut launch.outputs[product.c]), &[])
            }
            Epilogue::Add { bias: None, residual } => {
                let terms = [bare, launch.inputs[residual]];
                self.one(&ADD, &terms, again(&mut launch.outputs[product.c]), &[])
            }
            Epilogue::Add { bias: Some(bias), residual } => {
                let bias = launch.inputs[bias];
                let spread = spread(bias.view);
                let mut layer = self.memory.alloc(whole.numel() * dtype.size())?;
                let to = ArgMut { buffer: &mut layer, dtype, view: &whole };
                self.one(&ADD, &[bare, Arg { view: &spread, ..bias }], to, &[])?;
                let terms = [Arg { buffer: &layer, dtype, view: &whole }, launch.inputs[residual]];
                self.one(&ADD, &terms, again(&mut launch.outputs[product.c]), &[])
            }
            Epilogue::BiasGelu { bias, before } => {
                let bias = launch.inputs[bias];
                let spread = spread(bias.view);
                let terms = [bare, Arg { view: &spread, ..bias }];
                let [c, before] = two(launch, product.c, before);
                self.one(&ADD, &terms, again(before), &[])?;
                self.one(&GELU, &[seen(before)], again(c), &[])
            }
            Epilogue::SumsOfB { sums } => {
                let b = launch.inputs[product.b];
                let [c, sums] = two(launch, product.c, sums);
                self.one(&COPY, &[bare], again(c), &[])?;
                self.column_sums(&b, sums)
            }
        }
    }

    /// sums_j = the sum of x_gij over g and i.
    fn column_sums(&self, x: &Arg<'_>, sums: &mut ArgMut<'_>) -> Result<(), KernelError> {
        let view = x.view.permute(&[2, 0, 1]);
        self.one(&SUM, &[Arg { view: &view, ..*x }], again(sums), &[Scalar::Int(2), Scalar::Real(1.0)])
    }

    fn one(
        &self,
        kernel: &Kernel,
        inputs: &[Arg<'_>],
        output: ArgMut<'_>,
        scalars: &[Scalar],
    ) -> Result<(), KernelError> {
        (self.run)(kernel, &mut Launch { inputs, outputs: &mut [output], scalars })
    }

    /// A stack of products, with copies of what the library has no words for.
    fn plain(&self, launch: &mut Launch<'_>, product: Matmul) -> Result<(), KernelError> {
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
        let [a_view, b_view, c_view] = as_one([a.view, b.view, c.view]);
        let a = self.readable(&Arg { view: &a_view, ..a })?;
        let b = self.readable(&Arg { view: &b_view, ..b })?;
        let size = c.dtype.size();
        let own = Operand::of(&c_view, place(c.buffer, &c_view, c.dtype));
        let mut spare = match own {
            Some(_) => None,
            None => Some(self.memory.alloc(c_view.numel() * size)?),
        };
        let whole = Strides::contiguous(&c_view.shape);
        let (described, address) = match &spare {
            None => (own, place(c.buffer, &c_view, c.dtype)),
            Some(buffer) => {
                let address = place(buffer, &whole, c.dtype);
                (Operand::of(&whole, address), address)
            }
        };
        let task = MatmulDesc {
            dtype: c.dtype,
            extents: [c_view.shape[0], c_view.shape[1], c_view.shape[2], k],
            a: a.described,
            b: b.described,
            c: described.expect("row-major memory can be described"),
            added: None,
            epilogue: cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
        };
        self.give(task, ([a.address, b.address, address], EpilogueOperands::default()))?;
        if let Some(buffer) = spare.take() {
            let inputs = [Arg { buffer: &buffer, dtype: c.dtype, view: &whole }];
            let mut outputs = [ArgMut { buffer: &mut *c.buffer, dtype: c.dtype, view: &c_view }];
            (self.run)(&COPY, &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[] })?;
        }
        Ok(())
    }

    /// An operand that the library can read: as it is, or a copy (of one matrix, where all of the stack are the same).
    fn readable(&self, x: &Arg<'_>) -> Result<Readable, KernelError> {
        let address = place(x.buffer, x.view, x.dtype);
        if let Some(described) = Operand::of(x.view, address) {
            return Ok(Readable { described, address, _copy: None });
        }
        let is_shared = x.view.strides[0] == 0;
        let from = if is_shared { x.view.narrow(0, 0, 1) } else { x.view.clone() };
        let to = Strides::contiguous(&from.shape);
        let mut buffer = self.memory.alloc(from.numel() * x.dtype.size())?;
        let inputs = [Arg { view: &from, ..*x }];
        let mut outputs = [ArgMut { buffer: &mut buffer, dtype: x.dtype, view: &to }];
        (self.run)(&COPY, &mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &[] })?;
        let address = place(&buffer, &to, x.dtype);
        let mut seen = to.geometry();
        if is_shared {
            seen.strides[0] = 0;
        }
        let described = Operand::of(&seen.into(), address).expect("row-major memory can be described");
        Ok(Readable { described, address, _copy: Some(buffer) })
    }
}

/// An operand of a product, with the copy that it may lie in.
struct Readable {
    described: Operand,
    address: u64,
    _copy: Option<Buffer>,
}

/// A stack in which all share one b is one product of more rows, where the rows of all lie one behind another.
fn as_one([a, b, c]: [&Strides; 3]) -> [Strides; 3] {
    let joined = |x: &Strides| {
        let lies = x.strides[0] == x.strides[1] * x.shape[1];
        let shape = [1, x.shape[0] * x.shape[1], x.shape[2]];
        lies.then(|| Strides::new(shape[..].into(), [0, x.strides[1], x.strides[2]][..].into(), x.offset))
    };
    if b.strides[0] == 0
        && let (Some(a), Some(c)) = (joined(a), joined(c))
    {
        return [a, b.narrow(0, 0, 1), c];
    }
    [a.clone(), b.clone(), c.clone()]
}

/// What the library calls an epilogue, and where lies what it reads and writes.
fn epilogue_operands(launch: &Launch<'_>, epilogue: Epilogue) -> (cublasLtEpilogue_t, EpilogueOperands) {
    use cublasLtEpilogue_t as E;
    let input = |i: usize| place(launch.inputs[i].buffer, launch.inputs[i].view, launch.inputs[i].dtype);
    let output = |i: usize| place(launch.outputs[i].buffer, launch.outputs[i].view, launch.outputs[i].dtype);
    let at = |columns, whole| EpilogueOperands { columns, whole, added: 0 };
    match epilogue {
        Epilogue::Plain => (E::CUBLASLT_EPILOGUE_DEFAULT, EpilogueOperands::default()),
        Epilogue::Bias { bias } => (E::CUBLASLT_EPILOGUE_BIAS, at(input(bias), 0)),
        Epilogue::Add { bias, residual } => {
            let epilogue = bias.map_or(E::CUBLASLT_EPILOGUE_DEFAULT, |_| E::CUBLASLT_EPILOGUE_BIAS);
            (epilogue, EpilogueOperands { columns: bias.map_or(0, input), whole: 0, added: input(residual) })
        }
        Epilogue::BiasGelu { bias, before } => {
            (E::CUBLASLT_EPILOGUE_GELU_AUX_BIAS, at(input(bias), output(before)))
        }
        // Our b is the library's a, since rows of c are its columns.
        Epilogue::SumsOfB { sums } => (E::CUBLASLT_EPILOGUE_BGRADA, at(output(sums), 0)),
    }
}

/// An output once more, for another launch.
fn again<'a>(y: &'a mut ArgMut<'_>) -> ArgMut<'a> {
    ArgMut { buffer: &mut *y.buffer, dtype: y.dtype, view: y.view }
}

/// An output that was written, to be read.
fn seen<'a>(y: &'a ArgMut<'_>) -> Arg<'a> {
    Arg { buffer: &*y.buffer, dtype: y.dtype, view: y.view }
}

fn two<'s, 'a>(launch: &'s mut Launch<'a>, i: usize, j: usize) -> [&'s mut ArgMut<'a>; 2] {
    launch.outputs.get_disjoint_mut([i, j]).expect("two outputs of a plan")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stack_over_one_matrix_becomes_one_product() {
        let a = Strides::contiguous(&[4, 6, 10]);
        let b = Strides::contiguous(&[10, 30]).broadcast(&[4, 10, 30]).unwrap();
        let c = Strides::contiguous(&[4, 6, 30]);
        let [x, y, z] = as_one([&a, &b, &c]);
        assert_eq!(
            (x.shape[..].to_vec(), y.shape[..].to_vec(), z.shape[..].to_vec()),
            (vec![1, 24, 10], vec![1, 10, 30], vec![1, 24, 30])
        );
        let apart = c.permute(&[0, 1, 2]).narrow(1, 0, 5);
        let [x, _, _] = as_one([&a.narrow(1, 0, 5), &b, &apart]);
        assert_eq!(x.shape[..], [4, 5, 10]);
    }
}
