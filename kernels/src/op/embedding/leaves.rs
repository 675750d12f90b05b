//! The gradient of an embedding as a canonical sum. Only rows of the table that tokens read have leaves, so that the cost is that of the
//! tokens, and not that of a table for each leaf.

use super::cpu::{LEVELS, sum_tokens};
use super::{BACKWARD_IN_LEAVES, local};
use crate::cpu::{Pool, vectorized};
use crate::dtype::{Float, Real};
use crate::error::KernelError;
use crate::host_vec::filled_or_unwind;
use crate::kernel::Launch;
use crate::match_float;
use crate::op::rows::{check_indices, operands, read, rows_per_task, width, write};
use crate::sum_tree::{SumTree, TreeSums};
use std::convert::Infallible;

/// A token that reads a local row of the table: sorted by row, then by leaf, then by its number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Token {
    row: usize,
    leaf: usize,
    number: usize,
}

pub(super) fn backward(pool: &Pool, launch: &mut Launch<'_>) -> Result<(), KernelError> {
    let ([index, leaf, dy], [dtable], scalars) = operands(launch);
    let (v, d, v_start) = (dtable.view.shape[0], width(dy), scalars[0].int());
    let (index, leaf) = (read::<i64>(index), read::<i64>(leaf));
    check_indices(BACKWARD_IN_LEAVES.name, index, scalars[1].int())?;
    let tree = SumTree::new(scalars[2].int() as usize);
    if d == 0 {
        return Ok(());
    }
    let mut tokens: Vec<Token> = filled_or_unwind(Token::default(), index.len());
    tokens.clear();
    let pairs = index.iter().zip(leaf).enumerate();
    tokens.extend(pairs.filter_map(|(number, (&index, &leaf))| {
        Some(Token { row: local(index, v_start, v)?, leaf: leaf as usize, number })
    }));
    tokens.sort_unstable();
    match_float!(dy.dtype, T => {
        let (dy, rows) = (read::<T>(dy), rows_per_task(d));
        pool.chunks(write::<T>(dtable), rows * d, |i, dtable| {
            let start = tokens.partition_point(|token| token.row < i * rows);
            let mut sums = filled_or_unwind(<T as Float>::Acc::ZERO, LEVELS * d);
            vectorized(#[inline(always)] || {
                sum_rows(tree, &tokens[start..], i * rows, dy, &mut sums, dtable);
            });
        });
        Ok(())
    }, else Err(KernelError::DType { kernel: BACKWARD_IN_LEAVES.name, dtype: dy.dtype }))
}

/// Fills the rows from `first_row` on with the sums of their tokens, which are at the front of `tokens`. `sums` has one row per level,
/// zeros before and after.
#[inline(always)]
fn sum_rows<T: Float>(
    tree: SumTree,
    mut tokens: &[Token],
    first_row: usize,
    dy: &[T],
    sums: &mut [T::Acc],
    dtable: &mut [T],
) {
    let d = sums.len() / LEVELS;
    for (row, out) in dtable.chunks_exact_mut(d).enumerate() {
        out.fill(T::default());
        let count = tokens.iter().take_while(|token| token.row == first_row + row).count();
        let (mut of_row, rest) = tokens.split_at(count);
        tokens = rest;
        if of_row.is_empty() {
            continue;
        }
        let mut nodes: TreeSums<Vec<T>> = TreeSums::new(tree);
        for leaf in 0..tree.num_leaves() {
            let count = of_row.iter().take_while(|token| token.leaf == leaf).count();
            let (of_leaf, rest) = of_row.split_at(count);
            of_row = rest;
            let sum = (!of_leaf.is_empty()).then(|| sum_leaf(of_leaf, dy, sums));
            let Ok(()) = nodes.add(SumTree::leaf(leaf), sum, join);
        }
        debug_assert!(of_row.is_empty(), "a token has a leaf of the tree");
        // All leaves were added, so there is one root.
        if let Some((_, Some(root))) = nodes.into_roots().next() {
            out.copy_from_slice(&root);
        }
    }
}

/// Returns the rounded sum of the tokens of a leaf.
#[inline(always)]
fn sum_leaf<T: Float>(tokens: &[Token], dy: &[T], sums: &mut [T::Acc]) -> Vec<T> {
    let d = sums.len() / LEVELS;
    sum_tokens(tokens.iter().map(|token| token.number), dy, sums);
    let rounded = |sum: &mut T::Acc| T::narrow(std::mem::replace(sum, T::Acc::ZERO));
    sums[..d].iter_mut().map(rounded).collect()
}

/// Returns the rounded sum of two nodes.
#[inline(always)]
fn join<T: Float>(mut left: Vec<T>, right: Vec<T>) -> Result<Vec<T>, Infallible> {
    for (left, right) in left.iter_mut().zip(&right) {
        *left = T::narrow(left.widen() + right.widen());
    }
    Ok(left)
}

#[cfg(test)]
mod tests {
    use crate::backend::upload;
    use crate::cpu_backend::Cpu;
    use crate::dtype::{DType, Element};
    use crate::kernel::{Arg, ArgMut, Kernel, Launch, Scalar};
    use crate::op::embedding::{BACKWARD, BACKWARD_IN_LEAVES};
    use crate::strides::Strides;
    use crate::sum_tree::{SumTree, TreeSums};
    use std::convert::Infallible;

    const ROWS: usize = 3;
    const TOKENS: usize = 53;
    const WIDTH: usize = 5;
    const TABLE: usize = 7;
    const LEAVES: usize = 12;

    /// The gradient of the table from the tokens `range` of each row, by a kernel that takes leaves or not.
    fn gradient<T: Element>(kernel: &Kernel, dy: &[T], range: std::ops::Range<usize>) -> Vec<T> {
        let cpu = Cpu::backend(2);
        let tree = SumTree::new(LEAVES);
        let leaf_of =
            |t: usize| (0..LEAVES).find(|leaf| tree.leaf_range(TOKENS, *leaf).contains(&t)).unwrap();
        let tokens: Vec<(usize, usize)> =
            (0..ROWS).flat_map(|row| range.clone().map(move |t| (row, t))).collect();
        let index: Vec<i64> = tokens.iter().map(|(row, t)| ((row * 5 + t * t) % 11) as i64 - 2).collect();
        let index: Vec<i64> = index.iter().map(|i| (*i).max(0)).collect();
        let leaf: Vec<i64> = tokens.iter().map(|(_, t)| leaf_of(*t) as i64).collect();
        let at = |(row, t): &(usize, usize)| (row * TOKENS + t) * WIDTH;
        let dy: Vec<T> = tokens.iter().flat_map(|token| dy[at(token)..][..WIDTH].to_vec()).collect();
        let n = tokens.len();
        let [index, leaf] = [index, leaf].map(|numbers| upload(&*cpu, &numbers).unwrap());
        let dy = upload(&*cpu, &dy).unwrap();
        let mut table = upload(&*cpu, &[T::default(); TABLE * WIDTH]).unwrap();
        let [line, matrix, out] = [&[n][..], &[n, WIDTH], &[TABLE, WIDTH]].map(Strides::contiguous);
        let mut inputs = vec![
            Arg { buffer: &index, dtype: DType::I64, view: &line },
            Arg { buffer: &dy, dtype: T::DTYPE, view: &matrix },
        ];
        // The local rows are 1 .. 8 of 9.
        let mut scalars = vec![Scalar::Int(1), Scalar::Int(9)];
        if kernel.name == BACKWARD_IN_LEAVES.name {
            inputs.insert(1, Arg { buffer: &leaf, dtype: DType::I64, view: &line });
            scalars.push(Scalar::Int(LEAVES as i64));
        }
        let outputs = &mut [ArgMut { buffer: &mut table, dtype: T::DTYPE, view: &out }];
        cpu.launch(kernel, &mut Launch { inputs: &inputs, outputs, scalars: &scalars }).unwrap();
        table.as_slice::<T>()[..TABLE * WIDTH].to_vec()
    }

    /// The sum over the tree of the gradients of parts of the tokens, each of `each` leaves.
    fn joined<T: Element>(kernel: &Kernel, dy: &[T], each: usize, add: impl Fn(T, T) -> T + Copy) -> Vec<T> {
        let tree = SumTree::new(LEAVES);
        let mut sums = TreeSums::new(SumTree::new(LEAVES / each));
        for part in 0..LEAVES / each {
            let leaves = [part * each, (part + 1) * each - 1].map(|leaf| tree.leaf_range(TOKENS, leaf));
            let sum = gradient(kernel, dy, leaves[0].start..leaves[1].end);
            let join = |left: Vec<T>, right: Vec<T>| {
                Ok::<_, Infallible>(left.iter().zip(&right).map(|(left, right)| add(*left, *right)).collect())
            };
            let Ok(()) = sums.add(SumTree::leaf(part), Some(sum), join);
        }
        sums.into_roots().next().unwrap().1.unwrap()
    }

    fn check<T: Element + PartialEq>(narrow: impl Fn(f32) -> T, add: impl Fn(T, T) -> T + Copy) {
        let number = |i: usize| ((i * 7919) % 1009) as f32 - 504.0;
        let dy: Vec<T> = (0..ROWS * TOKENS * WIDTH).map(|i| narrow(number(i) / 37.0)).collect();
        let whole = gradient(&BACKWARD_IN_LEAVES, &dy, 0..TOKENS);
        assert!(joined(&BACKWARD, &dy, 1, add) == whole, "{}: a table for each leaf", T::DTYPE);
        for each in [1, 2, 4] {
            assert!(joined(&BACKWARD_IN_LEAVES, &dy, each, add) == whole, "{}: {each} leaves", T::DTYPE);
        }
        assert!(gradient(&BACKWARD, &dy, 0..TOKENS) != whole, "{}: leaves decide the order", T::DTYPE);
    }

    #[test]
    fn gradient_has_the_bits_of_a_table_for_each_leaf_however_ranks_hold_the_leaves() {
        use half::bf16;
        check(|x| x, |a: f32, b: f32| a + b);
        check(bf16::from_f32, |a: bf16, b: bf16| bf16::from_f32(a.to_f32() + b.to_f32()));
    }
}
