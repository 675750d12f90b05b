//! One kernel on operands of given shapes, on the back end of any device.

use super::line::{Bench, Work, check};
use shardgrad::Result;
use shardgrad::kernels::cpu::Pool;
use shardgrad::kernels::op::{copy, random};
use shardgrad::kernels::{
    Arg, ArgMut, Backend, Buffer, Cost, DType, Device, Kernel, KernelError, Launch, Scalar, Strides,
    download, upload,
};

/// Calls between two waits for a card.
const CALLS: usize = 10;

/// How an operand lies in memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum Form {
    Plain,
    /// Its last two dims the other way round.
    Turned,
    /// One row, seen as so many.
    Repeated(usize),
}

/// What the elements of an operand are.
#[derive(Clone, Copy, Debug)]
pub(super) enum Content {
    /// Numbers from -1 to 1; from 0 to 1 where they are written, since optimizer states want none below 0.
    Numbers,
    /// Whole numbers below this.
    Tokens(usize),
}

/// An operand: its dtype, its shape in memory but for turned dims, and how it lies there.
#[derive(Clone, Debug)]
pub(super) struct Operand {
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) form: Form,
    pub(super) content: Content,
}

/// A kernel on operands of given shapes.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) name: String,
    pub(super) kernel: &'static Kernel,
    pub(super) inputs: Vec<Operand>,
    pub(super) outputs: Vec<Operand>,
    pub(super) scalars: Vec<Scalar>,
    /// Whether operations count, not bytes.
    pub(super) by_flops: bool,
}

/// The memory of a case.
struct Memory {
    read: Vec<Buffer>,
    written: Vec<Buffer>,
}

impl Operand {
    /// Numbers of a dtype, side by side.
    pub(super) fn plain(dtype: DType, shape: &[usize]) -> Operand {
        Operand { dtype, shape: shape.to_vec(), form: Form::Plain, content: Content::Numbers }
    }

    /// Memory with its contents (of f64, what a step is told: rates below 1, and a gate that lets it pass); `stream` tells operands apart.
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

    /// Where its elements lie.
    fn view(&self) -> Strides {
        match self.form {
            Form::Plain => Strides::contiguous(&self.shape),
            Form::Turned => {
                let last = self.shape.len().saturating_sub(2);
                let (mut lying, mut order) = (self.shape.clone(), (0..self.shape.len()).collect::<Vec<_>>());
                lying.swap(last, last + 1);
                order.swap(last, last + 1);
                Strides::contiguous(&lying).permute(&order)
            }
            Form::Repeated(rows) => {
                let shape = [&[rows], &self.shape[..]].concat();
                Strides::contiguous(&shape[1..]).broadcast(&shape).expect("a row is one of many")
            }
        }
    }
}

impl Case {
    /// A kernel that is bound by memory, on numbers side by side.
    pub(super) fn new<const I: usize, const O: usize>(
        name: &str,
        kernel: &'static Kernel,
        inputs: [(DType, &[usize]); I],
        outputs: [(DType, &[usize]); O],
        scalars: &[Scalar],
    ) -> Case {
        let operand = |(dtype, shape): (DType, &[usize])| Operand::plain(dtype, shape);
        let (inputs, outputs) = (inputs.map(operand).to_vec(), outputs.map(operand).to_vec());
        Case { name: name.into(), kernel, inputs, outputs, scalars: scalars.to_vec(), by_flops: false }
    }

    /// The same, where an input lies otherwise.
    pub(super) fn lying(mut self, input: usize, form: Form) -> Case {
        self.inputs[input].form = form;
        self
    }

    /// The same, where inputs of whole numbers are below `kinds`.
    pub(super) fn of_tokens(mut self, kinds: usize) -> Case {
        let tokens = self.inputs.iter_mut().filter(|x| x.dtype == DType::I64);
        tokens.for_each(|x| x.content = Content::Tokens(kinds));
        self
    }

    /// Measures and tells it.
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
        bench.tell(group, &self.name, "", seconds, work);
        Ok(())
    }

    /// Holds what a back end gives against the reference of the kernel, on the host, to a part of `tolerance` of the largest
    /// number of each output.
    pub(super) fn check(&self, backend: &dyn Backend, host: &dyn Backend, tolerance: f64) -> Result<()> {
        let mut got = self.memory(backend)?;
        self.launch(&mut got, |launch| backend.launch(self.kernel, launch))?;
        let mut want = self.memory(host)?;
        let pool = Pool::new(1);
        self.launch(&mut want, |launch| (self.kernel.reference)(&pool, launch))?;
        for (operand, (got, want)) in self.outputs.iter().zip(got.written.iter().zip(&want.written)) {
            check(&self.name, &numbers(backend, operand, got)?, &numbers(host, operand, want)?, tolerance)?;
        }
        Ok(())
    }

    fn memory(&self, backend: &dyn Backend) -> Result<Memory> {
        let each = self.inputs.iter().enumerate();
        let read = each.map(|(i, x)| x.fill(backend, i as u64, -1.0)).collect::<Result<_>>()?;
        // Optimizer states are written in place, so that outputs need contents too.
        let each = self.outputs.iter().enumerate();
        let written = each.map(|(i, y)| y.fill(backend, 16 + i as u64, 0.0)).collect::<Result<_>>()?;
        Ok(Memory { read, written })
    }

    fn launch(
        &self,
        memory: &mut Memory,
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

/// The elements of an output, widened where they are.
fn numbers(backend: &dyn Backend, operand: &Operand, buffer: &Buffer) -> Result<Vec<f64>> {
    let numel: usize = operand.shape.iter().product();
    let (mut wide, view) = (backend.alloc(numel * size_of::<f32>())?, Strides::contiguous(&[numel]));
    let inputs = &[Arg { buffer, dtype: operand.dtype, view: &view }];
    let outputs = &mut [ArgMut { buffer: &mut wide, dtype: DType::F32, view: &view }];
    backend.launch(&copy::COPY, &mut Launch { inputs, outputs, scalars: &[] })?;
    Ok(download::<f32>(backend, &wide, numel)?.into_iter().map(f64::from).collect())
}
