//! Conformance test of kernels: the fast path must agree with the f64 reference for every float dtype, with equal bits on pools of 1, 2 and
//! 3 threads. So must the GPU source, run on the host with the threads of a block in several orders, with equal bits (feature `cuda`, if
//! g++ is installed).
//!
//! ```text
//! Case::new(&KERNEL).input(&[2, 3], &values(1, 6)).output(&[2]).scalars(&[Scalar::Int(1)]).strided().run();
//! ```

mod gpu;

use crate::buffer::{Allocator, Buffer};
use crate::cpu::Pool;
use crate::dtype::{DType, Element};
use crate::kernel::{Arg, ArgMut, CpuKernelFn, Kernel, Launch, Scalar};
use crate::match_dtype;
use crate::strides::Strides;
use approx::abs_diff_eq;
use std::cell::Cell;

/// How the dtype of an operand follows from the dtype under test.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    /// The dtype under test.
    Tested,
    /// The accumulator of the dtype under test: f32 for the 16-bit floats.
    Accumulator,
    /// A fixed dtype: indices, f64 statistics.
    Fixed(DType),
}

impl Kind {
    fn dtype(self, tested: DType) -> DType {
        match self {
            Kind::Tested => tested,
            Kind::Accumulator => tested.accumulator(),
            Kind::Fixed(dtype) => dtype,
        }
    }
}

/// One operand: the contents of its memory as f64, and the view of it.
#[derive(Clone, Debug)]
struct Operand {
    kind: Kind,
    view: Strides,
    memory: Vec<f64>,
}

/// A test case: one launch of one kernel.
#[derive(Clone, Debug)]
pub(crate) struct Case<'a> {
    kernel: &'a Kernel,
    inputs: Vec<Operand>,
    outputs: Vec<Operand>,
    scalars: Vec<Scalar>,
    strided: bool,
    scale: f64,
    allowance: f64,
}

/// The contents of an output before the launch, unless the case sets others: a kernel must not read them.
const STALE: f64 = 77.0;

impl<'a> Case<'a> {
    pub(crate) fn new(kernel: &'a Kernel) -> Case<'a> {
        Case {
            kernel,
            inputs: vec![],
            outputs: vec![],
            scalars: vec![],
            strided: false,
            scale: 0.0,
            allowance: 0.0,
        }
    }

    /// Adds a contiguous input of the dtype under test.
    pub(crate) fn input(self, shape: &[usize], values: &[f64]) -> Self {
        self.input_as(Kind::Tested, shape, values)
    }

    /// Adds a contiguous input of another dtype.
    pub(crate) fn input_as(self, kind: Kind, shape: &[usize], values: &[f64]) -> Self {
        assert_eq!(values.len(), shape.iter().product::<usize>(), "an input has as many values as elements");
        self.input_view(kind, Strides::contiguous(shape), values)
    }

    /// Adds an input that is any view of a memory with the given contents.
    pub(crate) fn input_view(mut self, kind: Kind, view: Strides, memory: &[f64]) -> Self {
        assert!(view.reach() <= memory.len(), "a view stays inside of its memory");
        self.inputs.push(Operand { kind, view, memory: memory.to_vec() });
        self
    }

    /// Adds a contiguous output of the dtype under test.
    pub(crate) fn output(self, shape: &[usize]) -> Self {
        self.output_as(Kind::Tested, shape)
    }

    /// Adds a contiguous output of another dtype.
    pub(crate) fn output_as(self, kind: Kind, shape: &[usize]) -> Self {
        let view = Strides::contiguous(shape);
        let memory = vec![STALE; view.numel()];
        self.output_view(kind, view, &memory)
    }

    /// Adds an output that is updated in place: any view of a memory with the given contents.
    pub(crate) fn output_view(mut self, kind: Kind, view: Strides, memory: &[f64]) -> Self {
        assert!(view.reach() <= memory.len(), "a view stays inside of its memory");
        self.outputs.push(Operand { kind, view, memory: memory.to_vec() });
        self
    }

    pub(crate) fn scalars(mut self, scalars: &[Scalar]) -> Self {
        self.scalars = scalars.to_vec();
        self
    }

    /// Tests also with every input's dims reversed in memory, and with gaps between all elements.
    pub(crate) fn strided(mut self) -> Self {
        self.strided = true;
        self
    }

    /// Sets the smallest scale at which errors are measured (for sums that cancel).
    pub(crate) fn scale(mut self, scale: f64) -> Self {
        self.scale = scale;
        self
    }

    /// Allows the fast path an extra error in ulps of a 16-bit output at its largest magnitude, where the contract allows rounded operands.
    pub(crate) fn allow(mut self, units: f64) -> Self {
        self.allowance = units;
        self
    }

    /// Tests the launch in every float dtype.
    pub(crate) fn run(&self) {
        self.run_for(&DType::FLOATS);
    }

    /// Tests the launch in the given dtypes.
    pub(crate) fn run_for(&self, dtypes: &[DType]) {
        if let Err(difference) = self.verify(dtypes) {
            panic!("{difference}");
        }
    }

    /// Returns the contents of the outputs' memory after the fast path, on one thread.
    pub(crate) fn fast(&self, dtype: DType) -> Vec<Vec<f64>> {
        let rounded = |operands: &[Operand]| operands.iter().map(|o| o.rounded(dtype)).collect::<Vec<_>>();
        let code = self.kernel.cpu.unwrap_or(self.kernel.reference);
        let (inputs, outputs) = (rounded(&self.inputs), rounded(&self.outputs));
        self.launch(&Pool::new(1), code, dtype, &inputs, &outputs).expect("the kernel runs")
    }

    /// Returns the bytes that the kernel counts for the launch.
    pub(crate) fn bytes(&self, dtype: DType) -> u64 {
        let counted = Cell::new(0);
        let count = |launch: &mut Launch<'_>| {
            counted.set(self.kernel.cost(launch).bytes);
            Ok(())
        };
        self.launch_by(&count, dtype, &self.inputs, &self.outputs).expect("nothing is run");
        counted.get()
    }

    /// [`Case::run_for`] with the failure as an error instead of a panic.
    pub(crate) fn verify(&self, dtypes: &[DType]) -> Result<(), String> {
        let pools = [1, 2, 3].map(Pool::new);
        for &dtype in dtypes {
            self.verify_on(&pools, dtype).map_err(|e| format!("{} {dtype}: {e}", self.kernel.name))?;
            if self.strided {
                for (name, lay) in [("reversed", reversed as fn(&Operand) -> Operand), ("gapped", gapped)] {
                    let inputs = self.inputs.iter().map(lay).collect();
                    let case = Case { inputs, ..self.clone() };
                    case.verify_on(&pools, dtype)
                        .map_err(|e| format!("{} {dtype} {name}: {e}", self.kernel.name))?;
                }
            }
        }
        Ok(())
    }

    fn verify_on(&self, pools: &[Pool], tested: DType) -> Result<(), String> {
        let wide = if tested.is_float() { DType::F64 } else { tested };
        let rounded: Vec<Operand> = self.inputs.iter().map(|o| o.rounded(tested)).collect();
        let written: Vec<Operand> = self.outputs.iter().map(|o| o.rounded(tested)).collect();
        let exact = match self.launch(&pools[0], self.kernel.reference, wide, &rounded, &written) {
            Ok(exact) => exact,
            Err(refusal) => {
                self.refused_on_gpu(tested, &rounded, &written, &refusal)?;
                return Err(refusal);
            }
        };
        let fast = self.kernel.cpu.unwrap_or(self.kernel.reference);
        let first = self.launch(&pools[0], fast, tested, &rounded, &written)?;
        let allowance = if matches!(tested, DType::BF16 | DType::F16) { self.allowance } else { 0.0 };
        self.compare("fast path", tested, &first, &exact, allowance)?;
        for pool in &pools[1..] {
            let got = self.launch(pool, fast, tested, &rounded, &written)?;
            let same = |(a, b): (&f64, &f64)| a.to_bits() == b.to_bits();
            if !got.iter().flatten().zip(first.iter().flatten()).all(same) {
                return Err(format!("{} threads give other bits than one", pool.num_threads()));
            }
        }
        let plain = self.launch(&pools[0], self.kernel.reference, tested, &rounded, &written)?;
        self.compare("reference", tested, &plain, &exact, 0.0)?;
        self.verify_on_gpu(tested, &rounded, &written, &exact)
    }

    /// Runs an implementation on fresh buffers; returns the contents of the outputs' memory afterwards.
    fn launch(
        &self,
        pool: &Pool,
        code: CpuKernelFn,
        tested: DType,
        inputs: &[Operand],
        outputs: &[Operand],
    ) -> Result<Vec<Vec<f64>>, String> {
        let code = |launch: &mut Launch<'_>| code(pool, launch).map_err(|e| e.to_string());
        self.launch_by(&code, tested, inputs, outputs)
    }

    fn launch_by(
        &self,
        code: &dyn Fn(&mut Launch<'_>) -> Result<(), String>,
        tested: DType,
        inputs: &[Operand],
        outputs: &[Operand],
    ) -> Result<Vec<Vec<f64>>, String> {
        let allocator = Allocator::default();
        let upload = |o: &Operand| store(&allocator, o.kind.dtype(tested), &o.memory);
        let read: Vec<Buffer> = inputs.iter().map(upload).collect();
        let mut written: Vec<Buffer> = outputs.iter().map(upload).collect();
        let args: Vec<Arg<'_>> = (inputs.iter().zip(&read))
            .map(|(o, buffer)| Arg { buffer, dtype: o.kind.dtype(tested), view: &o.view })
            .collect();
        let mut outs: Vec<ArgMut<'_>> = (outputs.iter().zip(&mut written))
            .map(|(o, buffer)| ArgMut { buffer, dtype: o.kind.dtype(tested), view: &o.view })
            .collect();
        let mut launch = Launch { inputs: &args, outputs: &mut outs, scalars: &self.scalars };
        code(&mut launch)?;
        Ok(outputs.iter().zip(&written).map(|(o, buffer)| load(buffer, o.kind.dtype(tested))).collect())
    }

    /// Compares outputs with the exact ones. `allowance` is in ulps, as [`LaunchPlan::extra_ulps`](crate::gpu::LaunchPlan::extra_ulps).
    fn compare(
        &self,
        who: &str,
        tested: DType,
        got: &[Vec<f64>],
        exact: &[Vec<f64>],
        allowance: f64,
    ) -> Result<(), String> {
        for (number, operand) in self.outputs.iter().enumerate() {
            let dtype = operand.kind.dtype(tested);
            let inside = places(&operand.view);
            let before = operand.rounded(tested).memory;
            let finite = inside.iter().map(|&p| exact[number][p].abs()).filter(|x| x.is_finite());
            let scale = finite.fold(self.scale, f64::max);
            let mut touched = vec![false; before.len()];
            for &place in &inside {
                touched[place] = true;
                let (g, e) = (got[number][place], exact[number][place]);
                let allowed = self.kernel.bound.ulps * unit(dtype.accumulator(), scale)
                    + 0.5 * unit(dtype, e)
                    + allowance * unit(dtype, scale);
                if !agrees(dtype, g, e, allowed) {
                    return Err(format!(
                        "{who}, output {number}, element {place}: {g} instead of {e} (+- {allowed:e})"
                    ));
                }
            }
            let same = |p: usize| got[number][p].to_bits() == before[p].to_bits();
            if let Some(place) = (0..before.len()).find(|&p| !touched[p] && !same(p)) {
                return Err(format!("{who}, output {number}: wrote outside of its view, at offset {place}"));
            }
        }
        Ok(())
    }
}

impl Operand {
    /// Returns the operand with its values rounded to its dtype.
    fn rounded(&self, tested: DType) -> Operand {
        let dtype = self.kind.dtype(tested);
        Operand { memory: self.memory.iter().map(|&x| round(dtype, x)).collect(), ..self.clone() }
    }
}

/// Returns whether a value is within `allowed` of the exact one, or equal to it after rounding, or both are NaN.
fn agrees(dtype: DType, got: f64, exact: f64, allowed: f64) -> bool {
    let exact_rounded = round(dtype, exact);
    got == exact_rounded || (got.is_nan() && exact.is_nan()) || abs_diff_eq!(got, exact, epsilon = allowed)
}

/// Returns one ulp (unit in the last place) of a dtype at a magnitude (0 for integers, which must agree exactly).
pub(crate) fn unit(dtype: DType, at: f64) -> f64 {
    let (digits, exponent_min) = match dtype {
        DType::F64 => (52, -1022),
        DType::F32 => (23, -126),
        DType::BF16 => (7, -126),
        DType::F16 => (10, -14),
        _ => return 0.0,
    };
    let exponent = if at.is_normal() { ((at.to_bits() >> 52) & 0x7ff) as i32 - 1023 } else { exponent_min };
    power_of_two(exponent.max(exponent_min) - digits)
}

/// Returns 2^exponent, at least 2^-1074, from its bits: `powi` takes a loop, and every compared element asks.
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(if exponent < -1022 { 1 << (exponent + 1074) } else { ((exponent + 1023) as u64) << 52 })
}

/// Rounds to the nearest value of a dtype.
pub(crate) fn round(dtype: DType, x: f64) -> f64 {
    match_dtype!(dtype, T => T::from_f64(x).to_f64())
}

/// Allocates memory with the given contents.
pub(crate) fn store(allocator: &Allocator, dtype: DType, values: &[f64]) -> Buffer {
    let mut buffer = allocator.alloc(values.len() * dtype.size()).expect("a test has memory");
    match_dtype!(dtype, T => {
        let memory = buffer.as_mut::<T>().expect("a fresh buffer has one handle");
        memory.iter_mut().zip(values).for_each(|(m, &x)| *m = T::from_f64(x));
    });
    buffer
}

/// Returns the contents of a buffer.
pub(crate) fn load(buffer: &Buffer, dtype: DType) -> Vec<f64> {
    match_dtype!(dtype, T => buffer.as_slice::<T>().iter().map(|x| x.to_f64()).collect())
}

/// Returns the offsets of the elements of a view, in row-major order.
pub(crate) fn places(view: &Strides) -> Vec<usize> {
    // Whole rows of the last dim: nearly all elements cost an addition each.
    let (shape, strides) = (&view.shape[..], &view.strides[..]);
    let Some((&len, outer)) = shape.split_last() else { return vec![view.offset] };
    let mut places = Vec::with_capacity(view.numel());
    for row in 0..outer.iter().product::<usize>() {
        let (mut at, mut start) = (row, view.offset);
        for (extent, stride) in outer.iter().zip(strides).rev() {
            start += at % extent * stride;
            at /= extent;
        }
        places.extend((0..len).map(|i| start + i * strides[outer.len()]));
    }
    places
}

/// Returns the same values in a memory whose dims are in reversed order.
fn reversed(operand: &Operand) -> Operand {
    let order: Vec<usize> = (0..operand.view.ndim()).rev().collect();
    let shape: Vec<usize> = order.iter().map(|&d| operand.view.shape[d]).collect();
    moved(operand, Strides::contiguous(&shape).permute(&order))
}

/// Returns the same values with unused elements before, between and after them.
fn gapped(operand: &Operand) -> Operand {
    let mut view =
        Strides::contiguous(&operand.view.shape.iter().map(|n| n + 1).collect::<Vec<_>>()).geometry();
    view.shape.clone_from(&operand.view.shape);
    view.strides.iter_mut().for_each(|s| *s *= 2);
    view.offset = 3;
    moved(operand, view.into())
}

/// Returns the same values through another view; the rest of the memory is NaN.
fn moved(operand: &Operand, view: Strides) -> Operand {
    let mut memory = vec![f64::NAN; view.reach() + 2];
    for (from, to) in places(&operand.view).into_iter().zip(places(&view)) {
        memory[to] = operand.memory[from];
    }
    Operand { kind: operand.kind, view, memory }
}

/// Returns reproducible pseudo-random numbers between -2 and 2.
pub(crate) fn values(seed: u64, count: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    next();
    (0..count).map(|_| 4.0 * next() - 2.0).collect()
}

#[cfg(test)]
mod tests;
