//! A benchmark case: one kernel on operands of given shapes, on any back end.

use super::measurement::{Bench, Work, check};
use shardgrad::Result;
use shardgrad::kernels::cpu::Pool;
use shardgrad::kernels::op::{copy, random};
use shardgrad::kernels::{
    Arg, ArgMut, Backend, Buffer, Cost, DType, Device, Kernel, KernelError, Launch, Scalar, Strides,
    download, upload,
};

/// Calls between two synchronizations with a GPU.
const CALLS: usize = 10;

/// Memory layout of an operand.
#[derive(Clone, Copy, Debug)]
pub(super) enum OperandLayout {
    Plain,
    /// The last two dims are transposed.
    Transposed,
    /// One row, broadcast to this many rows.
    Broadcast(usize),
}

/// Contents of an operand.
#[derive(Clone, Copy, Debug)]
pub(super) enum Content {
    /// Numbers in -1..1; outputs are initialized in 0..1, since optimizer state must not be negative.
    Numbers,
    /// Integers below this bound.
    Tokens(usize),
}

/// An operand: dtype, logical shape, memory layout and contents.
#[derive(Clone, Debug)]
pub(super) struct Operand {
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) layout: OperandLayout,
    pub(super) content: Content,
}

/// A kernel with its operands.
#[derive(Clone, Debug)]
pub(super) struct KernelCase {
    pub(super) name: String,
    pub(super) kernel: &'static Kernel,
    pub(super) inputs: Vec<Operand>,
    pub(super) outputs: Vec<Operand>,
    pub(super) scalars: Vec<Scalar>,
    /// Whether the rate is in FLOP/s instead of bytes/s.
    pub(super) by_flops: bool,
}

/// Allocated operands of a case.
struct Buffers {
    read: Vec<Buffer>,
    written: Vec<Buffer>,
}

impl Operand {
    /// Returns a contiguous operand of numbers.
    pub(super) fn plain(dtype: DType, shape: &[usize]) -> Operand {
        Operand { dtype, shape: shape.to_vec(), layout: OperandLayout::Plain, content: Content::Numbers }
    }

    /// Allocates and fills the operand; `stream` selects the random stream. f64 operands are optimizer inputs (rates, overflow check) and get 0.5.
    fn fill(&self, backend: &dyn Backend, stream: u64, low: f64) -> Result<Buffer> {
        let numel: usize = self.shape.iter().product();
        if let Content::Tokens(kinds) = self.content {
            let tokens: Vec<i64> = (0..numel).map(|i| ((i * 7919 + i * i % 97) % kinds) as i64).collect();
            return Ok(upload(backend, &tokens)?);
        }
        if self.dtype == DType::F64 {
            return Ok(upload(backend, &vec![0.5; numel])?);
        }
        let mut buffer = backend.alloc(numel * self.dtype.size())?;
        let view = Strides::contiguous(&[numel]);
        let range = [Scalar::Real(low), Scalar::Real(1.0)];
        let of = [Scalar::Int(5), Scalar::Int(stream as i64)];
        let scalars = [&of[..], &range, &[Scalar::Int(numel as i64), Scalar::Int(0)]].concat();
        let outputs = &mut [ArgMut { buffer: &mut buffer, dtype: self.dtype, view: &view }];
        backend.launch(&random::UNIFORM, &mut Launch { inputs: &[], outputs, scalars: &scalars })?;
        Ok(buffer)
    }

    /// Returns the strides of the operand.
    fn view(&self) -> Strides {
        match self.layout {
            OperandLayout::Plain => Strides::contiguous(&self.shape),
            OperandLayout::Transposed => {
                let last = self.shape.len().saturating_sub(2);
                let (mut stored, mut order) = (self.shape.clone(), (0..self.shape.len()).collect::<Vec<_>>());
                stored.swap(last, last + 1);
                order.swap(last, last + 1);
                Strides::contiguous(&stored).permute(&order)
            }
            OperandLayout::Broadcast(rows) => {
                let shape = [&[rows], &self.shape[..]].concat();
                Strides::contiguous(&shape[1..]).broadcast(&shape).expect("a row broadcasts to rows")
            }
        }
    }
}

impl KernelCase {
    /// Returns a memory-bound case with contiguous operands.
    pub(super) fn new<const I: usize, const O: usize>(
        name: &str,
        kernel: &'static Kernel,
        inputs: [(DType, &[usize]); I],
        outputs: [(DType, &[usize]); O],
        scalars: &[Scalar],
    ) -> KernelCase {
        let operand = |(dtype, shape): (DType, &[usize])| Operand::plain(dtype, shape);
        let (inputs, outputs) = (inputs.map(operand).to_vec(), outputs.map(operand).to_vec());
        KernelCase { name: name.into(), kernel, inputs, outputs, scalars: scalars.to_vec(), by_flops: false }
    }

    /// Sets the memory layout of an input.
    pub(super) fn with_layout(mut self, input: usize, layout: OperandLayout) -> KernelCase {
        self.inputs[input].layout = layout;
        self
    }

    /// Fills integer inputs with token ids below `kinds`.
    pub(super) fn with_tokens(mut self, kinds: usize) -> KernelCase {
        let tokens = self.inputs.iter_mut().filter(|x| x.dtype == DType::I64);
        tokens.for_each(|x| x.content = Content::Tokens(kinds));
        self
    }

    /// Measures and reports the case.
    pub(super) fn measure(&self, bench: &Bench, group: &str, backend: &dyn Backend) -> Result<()> {
        let calls = if backend.device() == Device::Cpu { 1 } else { CALLS };
        let mut memory = self.memory(backend)?;
        let mut cost = Cost::default();
        let seconds = bench.seconds(1, || {
            for _ in 0..calls {
                self.launch(&mut memory, |launch| {
                    cost = self.kernel.cost(launch);
                    backend.launch(self.kernel, launch)
                })?;
            }
            Ok(backend.synchronize()?)
        })? / calls as f64;
        let work =
            if self.by_flops { Work::Flops(cost.flops as f64) } else { Work::Bytes(cost.bytes as f64) };
        bench.report(group, &self.name, "", seconds, work);
        Ok(())
    }

    /// Compares the result of a back end with the reference kernel on the CPU, within `tolerance` relative to the largest element of each output.
    pub(super) fn check(&self, backend: &dyn Backend, host: &dyn Backend, tolerance: f64) -> Result<()> {
        let mut got = self.memory(backend)?;
        self.launch(&mut got, |launch| backend.launch(self.kernel, launch))?;
        let mut want = self.memory(host)?;
        let pool = Pool::new(1);
        self.launch(&mut want, |launch| (self.kernel.reference)(&pool, launch))?;
        for (operand, (got, want)) in self.outputs.iter().zip(got.written.iter().zip(&want.written)) {
            check(&self.name, &to_f64(backend, operand, got)?, &to_f64(host, operand, want)?, tolerance)?;
        }
        Ok(())
    }

    fn memory(&self, backend: &dyn Backend) -> Result<Buffers> {
        let each = self.inputs.iter().enumerate();
        let read = each.map(|(i, x)| x.fill(backend, i as u64, -1.0)).collect::<Result<_>>()?;
        // Optimizer state is updated in place, so outputs need contents too.
        let each = self.outputs.iter().enumerate();
        let written = each.map(|(i, y)| y.fill(backend, 16 + i as u64, 0.0)).collect::<Result<_>>()?;
        Ok(Buffers { read, written })
    }

    fn launch(
        &self,
        memory: &mut Buffers,
        run: impl FnOnce(&mut Launch<'_>) -> std::result::Result<(), KernelError>,
    ) -> Result<()> {
        let views = |all: &[Operand]| all.iter().map(Operand::view).collect::<Vec<Strides>>();
        let (from, to) = (views(&self.inputs), views(&self.outputs));
        let inputs: Vec<Arg<'_>> = (memory.read.iter().zip(&self.inputs).zip(&from))
            .map(|((buffer, x), view)| Arg { buffer, dtype: x.dtype, view })
            .collect();
        let mut outputs: Vec<ArgMut<'_>> = (memory.written.iter_mut().zip(&self.outputs).zip(&to))
            .map(|((buffer, y), view)| ArgMut { buffer, dtype: y.dtype, view })
            .collect();
        Ok(run(&mut Launch { inputs: &inputs, outputs: &mut outputs, scalars: &self.scalars })?)
    }
}

/// Reads an output as f64, converted on the device.
fn to_f64(backend: &dyn Backend, operand: &Operand, buffer: &Buffer) -> Result<Vec<f64>> {
    let numel: usize = operand.shape.iter().product();
    let (mut wide, view) = (backend.alloc(numel * size_of::<f32>())?, Strides::contiguous(&[numel]));
    let inputs = &[Arg { buffer, dtype: operand.dtype, view: &view }];
    let outputs = &mut [ArgMut { buffer: &mut wide, dtype: DType::F32, view: &view }];
    backend.launch(&copy::COPY, &mut Launch { inputs, outputs, scalars: &[] })?;
    Ok(download::<f32>(backend, &wide, numel)?.into_iter().map(f64::from).collect())
}
