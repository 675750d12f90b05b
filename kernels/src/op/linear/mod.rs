//! Products with the epilogues of a linear layer: bias, residual, GELU in its tanh form (Hendrycks and Gimpel, arXiv 1606.08415), and
//! their gradients. On a GPU the library fuses product and epilogue where it can.

mod cpu;
mod gpu;
#[cfg(test)]
mod tests;

use crate::dtype::Element;
use crate::error::KernelError;
use crate::gpu::Epilogue;
use crate::kernel::{Arg, Bound, GpuCode, Kernel, Launch};
use crate::match_float;
use crate::op::batched_matmul::BATCHED_MATMUL;
use crate::op::formula::{gelu_gate, gelu_slope};
use crate::op::rows::{operands, read, write};
use crate::op::strided_iter::element_offset;

/// The error bound is that of the product.
const BOUND: Bound = Bound { ulps: 64.0 };

/// c_ij = sum_l a_il b_lj + bias_j, for every matrix of a batch.
///
/// - in: a (g, m, k), b (g, k, n), any strides; bias (n), contiguous; one float dtype
/// - out: c (g, m, n), contiguous, same dtype
///
/// The sum over l is that of [`BATCHED_MATMUL`]. In 16-bit floats it may be rounded before the bias is added, an error of one ulp.
/// Counted: 2 g m n k.
#[doc(alias = "addmm")]
pub static LINEAR: Kernel = Kernel {
    name: "linear",
    reference: |_, launch| {
        let ([a, b, bias], [c], _) = operands(launch);
        match_float!(a.dtype, T => {
            let (bias, sums) = (read::<T>(bias), products::<T>(a, b));
            let columns = bias.len().max(1);
            let to = write::<T>(c).iter_mut().zip(sums).enumerate();
            to.for_each(|(at, (c, sum))| *c = T::from_f64(sum + bias[at % columns].to_f64()));
        }, else return Err(KernelError::DType { kernel: LINEAR.name, dtype: a.dtype }));
        Ok(())
    },
    cpu: Some(cpu::linear),
    gpu: Some(GpuCode {
        source: "",
        plan: |launch, plan| gpu::ended(&LINEAR, launch, plan, Epilogue::Bias { bias: 2 }),
    }),
    flops,
    bytes: None,
    bound: BOUND,
};

/// c_ij = (sum_l a_il b_lj + bias_j) + r_ij, for every matrix of a batch: a layer with a residual connection.
///
/// - in: as for [`LINEAR`], and r (g, m, n), contiguous, same dtype
/// - out: c (g, m, n), contiguous, same dtype
///
/// Terms are added in the accumulator in this order, on GPUs perhaps r before the bias. In 16-bit floats the sum over l may be rounded
/// before, and if the library has no fused algorithm once more between the two. Counted: 2 g m n k.
pub static LINEAR_ADD: Kernel = Kernel {
    name: "linear_add",
    reference: |_, launch| {
        let ([a, b, bias, r], [c], _) = operands(launch);
        match_float!(a.dtype, T => {
            let (bias, sums) = (read::<T>(bias), products::<T>(a, b));
            let columns = bias.len().max(1);
            let to = write::<T>(c).iter_mut().zip(read::<T>(r)).zip(sums).enumerate();
            to.for_each(|(at, ((c, r), sum))| *c = T::from_f64(sum + bias[at % columns].to_f64() + r.to_f64()));
        }, else return Err(KernelError::DType { kernel: LINEAR_ADD.name, dtype: a.dtype }));
        Ok(())
    },
    cpu: Some(cpu::linear_add),
    gpu: Some(GpuCode {
        source: "",
        plan: |launch, plan| {
            gpu::ended(&LINEAR_ADD, launch, plan, Epilogue::Add { bias: Some(2), residual: 3 })
        },
    }),
    flops,
    bytes: None,
    bound: BOUND,
};

/// c_ij = sum_l a_il b_lj + r_ij, for every matrix of a batch: [`LINEAR_ADD`] without a bias.
///
/// - in: a (g, m, k), b (g, k, n), any strides; r (g, m, n), contiguous; one float dtype
/// - out: c (g, m, n), contiguous, same dtype
///
/// In 16-bit floats the sum over l may be rounded before r is added. Counted: 2 g m n k.
#[doc(alias = "baddbmm")]
pub static MATMUL_ADD: Kernel = Kernel {
    name: "product_add",
    reference: |_, launch| {
        let ([a, b, r], [c], _) = operands(launch);
        match_float!(a.dtype, T => {
            let to = write::<T>(c).iter_mut().zip(read::<T>(r)).zip(products::<T>(a, b));
            to.for_each(|((c, r), sum)| *c = T::from_f64(sum + r.to_f64()));
        }, else return Err(KernelError::DType { kernel: MATMUL_ADD.name, dtype: a.dtype }));
        Ok(())
    },
    cpu: Some(cpu::product_add),
    gpu: Some(GpuCode {
        source: "",
        plan: |launch, plan| gpu::ended(&MATMUL_ADD, launch, plan, Epilogue::Add { bias: None, residual: 2 }),
    }),
    flops,
    bytes: None,
    bound: BOUND,
};

/// z_ij = sum_l a_il b_lj + bias_j and c = gelu(z), for every matrix of a batch.
///
/// - in: as for [`LINEAR`]
/// - out: c (g, m, n), z (g, m, n), contiguous, same dtype
///
/// z as in [`LINEAR`]; gelu may be applied to z before it is rounded. Counted: 2 g m n k.
pub static LINEAR_GELU: Kernel = Kernel {
    name: "linear_gelu",
    reference: |_, launch| {
        let ([a, b, bias], [c, z], _) = operands(launch);
        match_float!(a.dtype, T => {
            let (bias, sums) = (read::<T>(bias), products::<T>(a, b));
            let columns = bias.len().max(1);
            let to = write::<T>(c).iter_mut().zip(write::<T>(z)).zip(sums).enumerate();
            to.for_each(|(at, ((c, z), sum))| {
                let x = sum + bias[at % columns].to_f64();
                (*c, *z) = (T::from_f64(x * gelu_gate(x)), T::from_f64(x));
            });
        }, else return Err(KernelError::DType { kernel: LINEAR_GELU.name, dtype: a.dtype }));
        Ok(())
    },
    cpu: Some(cpu::linear_gelu),
    gpu: Some(GpuCode {
        source: "",
        plan: |launch, plan| {
            gpu::ended(&LINEAR_GELU, launch, plan, Epilogue::BiasGelu { bias: 2, pre_gelu: 1 })
        },
    }),
    flops,
    bytes: None,
    bound: BOUND,
};

/// c = (a b) gelu'(z) for every matrix of a batch, and sums_j = the sum of c_ij over all rows: the gradients through the bias and the gelu
/// of [`LINEAR_GELU`].
///
/// - in: a (g, m, k), b (g, k, n), any strides; z (g, m, n), contiguous; one float dtype
/// - out: c (g, m, n), contiguous; sums (n), same dtype
///
/// The product may be rounded before it is multiplied, and c before it is summed. Counted: 2 g m n k.
pub static MATMUL_GELU_GRAD: Kernel = Kernel {
    name: "product_gelu_grad",
    reference: |_, launch| {
        let ([a, b, z], [c, sums], _) = operands(launch);
        match_float!(a.dtype, T => {
            let columns = sums.view.numel();
            let mut totals = vec![0.0; columns];
            let to = write::<T>(c).iter_mut().zip(read::<T>(z)).zip(products::<T>(a, b)).enumerate();
            to.for_each(|(at, ((c, z), sum))| {
                let x = sum * gelu_slope(z.to_f64());
                totals[at % columns] += x;
                *c = T::from_f64(x);
            });
            write::<T>(sums).iter_mut().zip(totals).for_each(|(to, x)| *to = T::from_f64(x));
        }, else return Err(KernelError::DType { kernel: MATMUL_GELU_GRAD.name, dtype: a.dtype }));
        Ok(())
    },
    cpu: Some(cpu::product_gelu_grad),
    gpu: Some(GpuCode { source: gpu::SOURCE, plan: gpu::gelu_grad }),
    flops,
    bytes: None,
    bound: BOUND,
};

/// c = a b, and sums_j = the sum of b_lj over l: the gradients of weights and bias of a layer, from the transposed x and the cotangent.
///
/// - in: a (1, m, k), b (1, k, n), any strides, one float dtype
/// - out: c (1, m, n), contiguous; sums (n), same dtype
///
/// Counted: 2 m n k.
pub static MATMUL_BIAS_GRAD: Kernel = Kernel {
    name: "product_sums",
    reference: |_, launch| {
        let ([a, b], [c, sums], _) = operands(launch);
        match_float!(a.dtype, T => {
            let (columns, terms) = (sums.view.numel(), read_any::<T>(b));
            let mut totals = vec![0.0; columns];
            terms.iter().enumerate().for_each(|(at, x)| totals[at % columns] += x);
            write::<T>(c).iter_mut().zip(products::<T>(a, b)).for_each(|(c, x)| *c = T::from_f64(x));
            write::<T>(sums).iter_mut().zip(totals).for_each(|(to, x)| *to = T::from_f64(x));
        }, else return Err(KernelError::DType { kernel: MATMUL_BIAS_GRAD.name, dtype: a.dtype }));
        Ok(())
    },
    cpu: Some(cpu::product_sums),
    gpu: Some(GpuCode {
        source: "",
        plan: |launch, plan| gpu::ended(&MATMUL_BIAS_GRAD, launch, plan, Epilogue::BiasGrad { sums: 1 }),
    }),
    flops,
    bytes: None,
    bound: BOUND,
};

fn flops(launch: &Launch<'_>) -> u64 {
    (BATCHED_MATMUL.flops)(launch)
}

/// Returns all elements of an operand, row-major.
fn read_any<T: Element>(x: &Arg<'_>) -> Vec<f64> {
    let memory = x.buffer.as_slice::<T>();
    (0..x.view.numel()).map(|at| memory[element_offset(x.view, at)].to_f64()).collect()
}

/// Returns the elements of a b, row-major, before rounding.
fn products<T: Element>(a: &Arg<'_>, b: &Arg<'_>) -> Vec<f64> {
    let ([g, m, k], n) = ([a.view.shape[0], a.view.shape[1], a.view.shape[2]], b.view.shape[2]);
    let (a, b) = (read_any::<T>(a), read_any::<T>(b));
    let sum = |p: usize, i: usize, j: usize| -> f64 {
        (0..k).map(|l| a[(p * m + i) * k + l] * b[(p * k + l) * n + j]).sum()
    };
    (0..g * m * n).map(|at| sum(at / (m * n), at / n % m, at % n)).collect()
}
