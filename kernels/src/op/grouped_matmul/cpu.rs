//! Grouped matrix products on the CPU: one batched product per group.

use super::{FORWARD, WEIGHT_GRAD};
use crate::cpu::Pool;
use crate::cpu::gemm::{BatchedMatrixMut, BatchedMatrixRef, batched_gemm};
use crate::error::KernelError;
use crate::kernel::Launch;
use crate::match_float;
use crate::op::rows::{operands, read, write};

pub(super) fn product(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x, w, starts], [y], _) = operands(launch);
    let [v, k, m] = w.view.shape[..] else { unreachable!("the contract asks for three dims") };
    let [per_group, down, right] = w.view.strides[..] else { unreachable!("as many as extents") };
    let starts = read::<i64>(starts);
    match_float!(x.dtype, T => {
        let (x, y) = (read::<T>(x), write::<T>(y));
        let matrices: &[T] = if w.view.reach() == 0 { &[] } else { &w.buffer.as_slice()[w.view.offset..] };
        for (g, rows) in (0..v).map(|g| (g, starts[g] as usize..starts[g + 1] as usize)) {
            if rows.is_empty() || m == 0 {
                continue;
            }
            let a = BatchedMatrixRef { data: &x[rows.start * k..rows.end * k], strides: [0, k, 1] };
            let b = BatchedMatrixRef { data: if k == 0 { &[] } else { &matrices[g * per_group..] }, strides: [0, down, right] };
            let c = BatchedMatrixMut { data: &mut y[rows.start * m..rows.end * m], strides: [0, m, 1] };
            batched_gemm(pool, [1, rows.len(), m, k], a, b, c);
        }
        y[starts[v] as usize * m..].fill(T::default());
    }, else return Err(KernelError::DType { kernel: FORWARD.name, dtype: x.dtype }));
    Ok(())
}

pub(super) fn gradient(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([x, dy, starts], [dw], _) = operands(launch);
    let [v, k, m] = dw.view.shape[..] else { unreachable!("the contract asks for three dims") };
    let starts = read::<i64>(starts);
    match_float!(x.dtype, T => {
        let (x, dy, dw) = (read::<T>(x), read::<T>(dy), write::<T>(dw));
        if k * m == 0 {
            return Ok(());
        }
        for (g, dw) in (0..v).zip(dw.chunks_exact_mut(k * m)) {
            let rows = starts[g] as usize..starts[g + 1] as usize;
            let a = BatchedMatrixRef { data: &x[rows.start * k..rows.end * k], strides: [0, 1, k] };
            let b = BatchedMatrixRef { data: &dy[rows.start * m..rows.end * m], strides: [0, m, 1] };
            batched_gemm(pool, [1, k, m, rows.len()], a, b, BatchedMatrixMut { data: dw, strides: [0, m, 1] });
        }
    }, else return Err(KernelError::DType { kernel: WEIGHT_GRAD.name, dtype: x.dtype }));
    Ok(())
}
