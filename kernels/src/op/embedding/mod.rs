//! Embedding: rows of a (possibly sharded) table selected by index, and the gradient of the table.

mod cpu;
mod gpu;
mod leaves;

use crate::cpu::Pool;
use crate::dtype::Element;
use crate::error::KernelError;
use crate::kernel::{Arg, Bound, GpuCode, Kernel, Launch};
use crate::match_float;
use crate::op::rows::{check_indices, operands, read, width, write};

/// The elements of a row that is on another rank: -0, since -0 + x has the bits of x for every x, -0 included. GPUs give 0.
const ABSENT: f64 = -0.0;

/// y_n = table_(index_n - v_start), -0 if the row is on another rank.
///
/// - in: table `(v, d)`, any float, contiguous; index `(n..)`, i64, contiguous
/// - out: y `(n.., d)` like table
/// - scalars: Int v_start, the global number of the first local row; Int v_global, the rows of the whole table
///
/// An index outside of `0..v_global` is [`KernelError::Index`]. Exact. Counted: no operations.
pub static FORWARD: Kernel = Kernel {
    name: "embedding",
    reference: forward,
    cpu: Some(cpu::forward),
    gpu: Some(GpuCode { source: gpu::GATHER_SOURCE, plan: gpu::forward }),
    flops: |_| 0,
    bytes: Some(|launch| {
        // No more rows of the table than there are indices.
        let (table, num_picked) = (&launch.inputs[0], launch.inputs[1].view.numel());
        let rows = table.view.shape[0];
        let view = table.view.narrow(0, 0, rows.min(num_picked));
        launch.operand_bytes() - table.bytes() + Arg { view: &view, ..*table }.bytes()
    }),
    bound: Bound { ulps: 0.0 },
};

/// dtable_i = sum of dy_n over all n with index_n = v_start + i; zeros where there is none.
///
/// - in: index `(n..)`, i64; dy `(n.., d)`, any float, contiguous
/// - out: dtable `(v, d)` like dy
/// - scalars: as for [`FORWARD`]
///
/// A row is summed in the accumulator, in the order of n: sums of 32 terms, then sums of 32 such sums, then 32 of these, and the rest;
/// and rounded once. An index outside of `0..v_global` is [`KernelError::Index`]. Counted: 1 operation per element of dy.
pub static BACKWARD: Kernel = Kernel {
    name: "embedding_backward",
    reference: backward,
    cpu: Some(cpu::backward),
    gpu: Some(GpuCode { source: gpu::SCATTER_ADD_SOURCE, plan: gpu::backward }),
    flops: |launch| launch.inputs[1].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 64.0 },
};

/// [`BACKWARD`] as a canonical sum: the terms of a row are summed leaf by leaf, and the leaves joined in their tree
/// ([`SumTree`](crate::SumTree)), each leaf and node rounded to the dtype of dy. No sum is -0, since each starts from 0, so that 0 stands for a
/// leaf without tokens of a row: ranks with some of the leaves each add up to the bits of one rank with all of them.
///
/// - in: index `(n..)`, i64; leaf `(n..)`, i64, the leaf of each index; dy `(n.., d)`, any float; all contiguous
/// - out: dtable `(v, d)` like dy
/// - scalars: as for [`FORWARD`], then Int, the number of leaves
///
/// Within a leaf terms are summed as by [`BACKWARD`]. Runs on the CPU. Counted: as there.
pub static BACKWARD_IN_LEAVES: Kernel = Kernel {
    name: "embedding_backward_in_leaves",
    reference: leaves::backward,
    cpu: Some(leaves::backward),
    gpu: None,
    flops: |launch| launch.inputs[2].view.numel() as u64,
    bytes: None,
    bound: Bound { ulps: 64.0 },
};

/// Returns the local number of a global row, of the `v` rows that start at `v_start`; `None` if the row is on another rank.
fn local(index: i64, v_start: i64, v: usize) -> Option<usize> {
    usize::try_from(index - v_start).ok().filter(|&at| at < v)
}

fn forward(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([table, index], [y], scalars) = operands(launch);
    let (v, d, v_start) = (table.view.shape[0], width(table), scalars[0].int());
    let index = read::<i64>(index);
    check_indices(FORWARD.name, index, scalars[1].int())?;
    match_float!(table.dtype, T => {
        let (table, y) = (read::<T>(table), write::<T>(y));
        for (n, &index) in index.iter().enumerate() {
            for j in 0..d {
                y[n * d + j] = local(index, v_start, v).map_or(T::from_f64(ABSENT), |row| table[row * d + j]);
            }
        }
        Ok(())
    }, else Err(KernelError::DType { kernel: FORWARD.name, dtype: table.dtype }))
}

fn backward(_: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([index, dy], [dtable], scalars) = operands(launch);
    let (v, d, v_start) = (dtable.view.shape[0], width(dy), scalars[0].int());
    let index = read::<i64>(index);
    check_indices(BACKWARD.name, index, scalars[1].int())?;
    match_float!(dy.dtype, T => {
        let dy = read::<T>(dy);
        let mut sums = vec![0.0; v * d];
        for (n, &index) in index.iter().enumerate() {
            if let Some(row) = local(index, v_start, v) {
                (0..d).for_each(|j| sums[row * d + j] += dy[n * d + j].to_f64());
            }
        }
        write::<T>(dtable).iter_mut().zip(sums).for_each(|(out, sum)| *out = T::from_f64(sum));
        Ok(())
    }, else Err(KernelError::DType { kernel: BACKWARD.name, dtype: dy.dtype }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::kernel::{ArgMut, Scalar};
    use crate::op::finite_difference::{Value, check_gradients, dot, evaluate};
    use crate::op::kernel_check::{Case, Kind, values};
    use crate::strides::Strides;

    const INDEX: Kind = Kind::Fixed(DType::I64);

    fn shard(v_start: i64, v_global: i64) -> [Scalar; 2] {
        [Scalar::Int(v_start), Scalar::Int(v_global)]
    }

    #[test]
    fn matches_known_values() {
        // Rows 1 and 2 of a table of 4.
        let table = Value::real(&[2, 2], &[1.0, 2.0, 3.0, 4.0]);
        let index = Value::index(&[4], &[2.0, 0.0, 1.0, 2.0]);
        let y = evaluate(&FORWARD, &[table, index.clone()], &[&[4, 2]], &shard(1, 4)).remove(0);
        assert_eq!(y, [3.0, 4.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0]);
        assert!(y[2].is_sign_negative() && y[3].is_sign_negative());
        let dy = Value::real(&[4, 2], &[1.0, 2.0, 10.0, 20.0, 100.0, 200.0, 1000.0, 2000.0]);
        let dtable = evaluate(&BACKWARD, &[index, dy], &[&[2, 2]], &shard(1, 4)).remove(0);
        assert_eq!(dtable, [100.0, 200.0, 1001.0, 2002.0]);
    }

    #[test]
    fn fast_path_matches_the_reference() {
        for (v, d, n) in [(1, 1, 1), (5, 3, 40), (300, 70, 50), (7, 0, 3), (0, 4, 3), (4, 4, 0), (2, 3000, 9)]
        {
            let index: Vec<f64> = (0..n).map(|i| ((i * i + 1) % (v + 9)) as f64).collect();
            Case::new(&FORWARD)
                .input(&[v, d], &values(1, v * d))
                .input_as(INDEX, &[n], &index)
                .output(&[n, d])
                .scalars(&shard(3, 400))
                .run();
            Case::new(&BACKWARD)
                .input_as(INDEX, &[n], &index)
                .input(&[n, d], &values(2, n * d))
                .output(&[v, d])
                .scalars(&shard(3, 400))
                .run();
        }
    }

    /// Rows with token counts around multiples of the block sizes of sums, and one with most tokens of a long text.
    #[test]
    fn long_sums_of_equal_terms_keep_the_bound() {
        let counts = [31, 32, 33, 63, 64, 1023, 1024, 1025, 0, 1, 100_000];
        let index: Vec<f64> = (0..counts.len()).flat_map(|v| vec![v as f64; counts[v]]).collect();
        for (d, term) in [(1, 0.1), (8, 0.3)] {
            // The reference is a plain sum in f64, no more exact there than the kernel under test.
            Case::new(&BACKWARD)
                .input_as(INDEX, &[index.len()], &index)
                .input(&[index.len(), d], &vec![term; index.len() * d])
                .output(&[counts.len(), d])
                .scalars(&shard(0, counts.len() as i64))
                .run_for(&[DType::F32, DType::BF16, DType::F16]);
        }
    }

    #[test]
    fn streamed_table_has_the_sums_of_a_small_one() {
        let (cpu, d, tokens) = (crate::cpu_backend::Cpu::backend(2), 1023, [5i64, 8191, 0, 5, 40, 5]);
        let dy: Vec<f32> = (0..tokens.len() * d).map(|i| (i as f32).sqrt()).collect();
        let [index, dy] =
            [crate::backend::upload(&*cpu, &tokens), crate::backend::upload(&*cpu, &dy)].map(Result::unwrap);
        let table = |v: usize| {
            let mut dtable = crate::backend::upload(&*cpu, &vec![-1f32; v * d]).unwrap();
            let views = [&[tokens.len()][..], &[tokens.len(), d], &[v, d]].map(Strides::contiguous);
            let inputs = [
                Arg { buffer: &index, dtype: DType::I64, view: &views[0] },
                Arg { buffer: &dy, dtype: DType::F32, view: &views[1] },
            ];
            let outputs = &mut [ArgMut { buffer: &mut dtable, dtype: DType::F32, view: &views[2] }];
            cpu.launch(&BACKWARD, &mut Launch { inputs: &inputs, outputs, scalars: &shard(0, 9000) })
                .unwrap();
            dtable.as_slice::<f32>()[..v * d].to_vec()
        };
        let (large, small) = (table(8300), table(41));
        assert_eq!(large[..small.len()], small);
        assert_eq!(large[8191 * d..8192 * d], dy.as_slice::<f32>()[d..2 * d]);
        assert!(large[41 * d..8191 * d].iter().chain(&large[8192 * d..]).all(|&sum| sum == 0.0));
    }

    #[test]
    fn index_out_of_range_is_an_error() {
        for bad in [-1.0, 10.0] {
            let index = [0.0, bad, 9.0];
            let case = Case::new(&FORWARD).input(&[4, 2], &values(1, 8)).input_as(INDEX, &[3], &index);
            let error = case.output(&[3, 2]).scalars(&shard(0, 10)).verify(&[DType::BF16]).unwrap_err();
            assert!(error.contains(&format!("index {bad} at position 1 is outside of 0..10")), "{error}");
            let case = Case::new(&BACKWARD).input_as(INDEX, &[3], &index).input(&[3, 2], &values(1, 6));
            case.output(&[4, 2]).scalars(&shard(0, 10)).verify(&[DType::BF16]).unwrap_err();
        }
    }

    #[test]
    fn backward_matches_finite_differences() {
        let inputs =
            [Value::real(&[3, 2], &values(5, 6)), Value::index(&[2, 3], &[1.0, 2.0, 0.0, 3.0, 2.0, 4.0])];
        let dy = Value::real(&[2, 3, 2], &values(6, 12));
        let dtable =
            evaluate(&BACKWARD, &[inputs[1].clone(), dy.clone()], &[&[3, 2]], &shard(1, 5)).remove(0);
        let loss = |x: &[Value]| dot(&evaluate(&FORWARD, x, &[&[2, 3, 2]], &shard(1, 5))[0], &dy.data);
        check_gradients(&inputs, &[(0, dtable)], loss).unwrap();
    }
}
