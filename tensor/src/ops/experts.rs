//! Rows that each pass some of many gated layers: y_m = the sum over s of p_(m, s) E_e(x_m) with e = index_(m, s), where
//! E_e(x) = (silu(x wg_e) * (x wu_e)) wd_e. Shazeer et al., arXiv 1701.06538; no row is dropped, whatever experts get.

use super::embedding::check_index;
use super::{Case, Input};
use crate::layout::Layout;
use crate::op::{Cotangents, DTypes, Keeps, Local, Op, Pieces, Vjp, common_float};
use crate::piece::{Piece, launch};
use crate::tensor::Tensor;
use shardgrad_dist::{Rank, Result};
use shardgrad_kernels::op::batched_matmul::BATCHED_MATMUL;
use shardgrad_kernels::op::binary::{ADD, MUL};
use shardgrad_kernels::op::grouped_matmul::{GRADIENT, PRODUCT};
use shardgrad_kernels::op::index::{GATHER, SCATTER_ADD};
use shardgrad_kernels::op::sort_by_group::SORT_BY_GROUP;
use shardgrad_kernels::op::swiglu;
use shardgrad_kernels::{DType, Kernel, Scalar, Strides};
use smallvec::SmallVec;
use std::rc::Rc;

/// `..m d!, ..m s!, ..m s!, [e] d! h, [e] d! h, [e] h o! -> ..m o!` on x, indices (i64, each in 0..e), p, and the matrices wg, wu and
/// wd of all experts; x, p and matrices of one float dtype.
///
/// Pairs of a row and an expert are put in order of the experts on the device, so no shape depends on where rows go. A rank computes
/// the pairs whose expert it holds; experts that are split, and hidden units that are, leave a pending sum. Experts of a row are added
/// up in their order in the accumulator, each rounded before.
///
/// With h = silu(x wg) * (x wu), of a pair, and g' = g wd^T: dp = g' h; dwd = the sum of p h^T g; dh = p g', from which those of both
/// products come as for [`SwiGlu`](super::swiglu::SwiGlu), and from these dx, dwg and dwu. Nothing but the arguments is kept: what lies
/// between them would be kept for the pairs of all experts on each rank, and is computed again.
#[derive(Debug)]
pub struct Experts;

/// Cotangents, linear in g; of x and p, of the matrices, or of all.
#[derive(Debug)]
struct ExpertsBackward(Part);

/// Whose cotangents are formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    All,
    Rows,
    Matrices,
}

/// The pairs of this rank's rows, in the order of the experts that are here.
struct Pairs<'a> {
    rank: &'a Rank,
    /// The number of each pair in that order.
    order: Piece,
    /// Its row.
    row: Piece,
    /// Where each pair stands in that order.
    place: Piece,
    /// Where the pairs of each expert begin.
    starts: Piece,
    num_rows: usize,
    /// The number of all experts.
    num_experts: usize,
}

impl<'a> Pairs<'a> {
    fn of(local: &Local<'a>, index: &Piece) -> Result<Pairs<'a>> {
        let (rank, count) = (local.rank, index.numel());
        let [num_rows, per_row] = rows_and_width(index);
        let (num_experts, here) = local.label("e");
        let index = flat(&index.contiguous(rank)?);
        let line = |n: usize| Piece::alloc(rank, DType::I64, &[n]);
        let [mut order, mut row, mut place] = [line(count)?, line(count)?, line(count)?];
        let mut starts = line(here.len() + 1)?;
        let scalars = [here.start, num_experts, per_row.max(1)].map(|n| Scalar::Int(n as i64));
        launch(
            rank,
            &SORT_BY_GROUP,
            &[&index],
            &mut [&mut order, &mut row, &mut place, &mut starts],
            &scalars,
        )?;
        Ok(Pairs { rank, order, row, place, starts, num_rows, num_experts })
    }

    fn count(&self) -> usize {
        self.order.numel()
    }

    /// For each pair its row of a matrix.
    fn rows_of(&self, x: &Piece) -> Result<Piece> {
        self.picked(x, &self.row)
    }

    /// The numbers of pairs, given in the order of rows, in the order of experts.
    fn ordered(&self, p: &Piece) -> Result<Piece> {
        let column = flat(&p.contiguous(self.rank)?);
        self.picked(&column.viewed(column.view.unsqueeze(1)), &self.order)
    }

    /// The converse.
    fn in_order_of_rows(&self, p: &Piece) -> Result<Piece> {
        self.picked(p, &self.place)
    }

    fn picked(&self, x: &Piece, index: &Piece) -> Result<Piece> {
        let (n, width) = (x.view.shape[0], x.view.shape[1]);
        let mut y = Piece::alloc(self.rank, x.dtype, &[1, index.numel(), width])?;
        let x = x.viewed(Strides::contiguous(&[1, n, width]).at(x.view.offset));
        let scalars = [Scalar::Int(0), Scalar::Int(n as i64)];
        launch(self.rank, &GATHER, &[&x, index], &mut [&mut y], &scalars)?;
        Ok(y.viewed(Strides::contiguous(&[index.numel(), width])))
    }

    /// For each row the sum over its pairs.
    fn sums(&self, x: &Piece, y: &mut Piece) -> Result<()> {
        let (n, width) = (x.view.shape[0], x.view.shape[1]);
        let x = x.viewed(Strides::contiguous(&[1, n, width]));
        let whole = std::mem::replace(&mut y.view, Strides::contiguous(&[1, self.num_rows, width]).into());
        let scalars = [Scalar::Int(0), Scalar::Int(self.num_rows as i64)];
        launch(self.rank, &SCATTER_ADD, &[&self.row, &x], &mut [&mut *y], &scalars)?;
        y.view = whole;
        Ok(())
    }

    /// Each pair times the matrix of its expert.
    fn product(&self, x: &Piece, w: &Piece) -> Result<Piece> {
        let mut y = Piece::alloc(self.rank, x.dtype, &[self.count(), w.view.shape[2]])?;
        launch(self.rank, &PRODUCT, &[x, w, &self.starts], &mut [&mut y], &self.scalars())?;
        Ok(y)
    }

    /// The gradients of the matrices of a product.
    fn gradient(&self, x: &Piece, dy: &Piece, dw: &mut Piece) -> Result<()> {
        launch(self.rank, &GRADIENT, &[x, dy, &self.starts], &mut [dw], &self.scalars())
    }

    fn scalars(&self) -> [Scalar; 1] {
        [Scalar::Int(self.num_experts as i64)]
    }

    /// The same shape from two of it.
    fn both(&self, kernel: &Kernel, a: &Piece, b: &Piece) -> Result<Piece> {
        let mut y = Piece::alloc(self.rank, a.dtype, &a.view.shape)?;
        launch(self.rank, kernel, &[a, b], &mut [&mut y], &[])?;
        Ok(y)
    }

    /// Rows times one number each.
    fn scaled(&self, x: &Piece, by: &Piece) -> Result<Piece> {
        let repeated = by.view.broadcast(&x.view.shape).expect("a column repeats to any width");
        self.both(&MUL, x, &by.viewed(repeated))
    }

    /// The sum over each row of a b.
    fn dots(&self, a: &Piece, b: &Piece) -> Result<Piece> {
        let (n, width) = (a.view.shape[0], a.view.shape[1]);
        let mut y = Piece::alloc(self.rank, a.dtype, &[n, 1, 1])?;
        let (a, b) = (a.viewed(a.view.unsqueeze(1)), b.viewed(b.view.unsqueeze(2)));
        debug_assert_eq!(b.view.shape[..], [n, width, 1], "both are (n, width)");
        launch(self.rank, &BATCHED_MATMUL, &[&a, &b], &mut [&mut y], &[])?;
        Ok(y.viewed(Strides::contiguous(&[n, 1])))
    }
}

/// The extent of the last dim, and the number of rows of it.
fn rows_and_width(x: &Piece) -> [usize; 2] {
    let (width, dims) = x.view.shape.split_last().expect("the signature names a last dim");
    [dims.iter().product(), *width]
}

/// A piece without gaps as one dim.
fn flat(x: &Piece) -> Piece {
    x.viewed(Strides::contiguous(&[x.numel()]).at(x.view.offset))
}

/// A piece as rows of its last dim, without gaps.
fn as_rows(rank: &Rank, x: &Piece) -> Result<Piece> {
    let x = x.contiguous(rank)?;
    Ok(x.viewed(Strides::contiguous(&rows_and_width(&x)).at(x.view.offset)))
}

/// A stack of matrices turned.
fn turned(w: &Piece) -> Piece {
    w.viewed(w.view.permute(&[0, 2, 1]))
}

/// Operations on `pairs` rows, as many for each expert as for the others.
fn volume(args: &[&Layout]) -> usize {
    let (gate, down) = (args[3], args[5]);
    let per_pair = gate.extent(2).saturating_mul(2 * gate.extent(1) + down.extent(2));
    args[1].numel().saturating_mul(per_pair)
}

impl Op for Experts {
    fn name(&self) -> &'static str {
        "experts"
    }

    fn signature(&self) -> &str {
        "..m d!, ..m s!, ..m s!, [e] d! h, [e] d! h, [e] h o! -> ..m o!"
    }

    fn differentiable(&self) -> &'static [bool] {
        &[true, false, true, true, true, true]
    }

    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[0, 1, 2, 3, 4, 5], outputs: &[] }
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        check_index(inputs[1])?;
        let floats: SmallVec<[DType; 6]> =
            inputs.iter().enumerate().filter(|(i, _)| *i != 1).map(|(_, dtype)| *dtype).collect();
        Ok(SmallVec::from_slice(&[common_float(&floats)?]))
    }

    fn volume(&self, _: usize, args: &[&Layout], _: &[Layout]) -> usize {
        volume(args)
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let pairs = Pairs::of(local, x[1])?;
        let rows = pairs.rows_of(&as_rows(local.rank, x[0])?)?;
        let hidden =
            pairs.both(&swiglu::FORWARD, &pairs.product(&rows, x[3])?, &pairs.product(&rows, x[4])?)?;
        let found = pairs.scaled(&pairs.product(&hidden, x[5])?, &pairs.ordered(x[2])?)?;
        let mut y = local.output(0)?;
        pairs.sums(&found, &mut y)?;
        Ok([y].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let part = match (cx.wanted[0] || cx.wanted[2], cx.wanted[3..].contains(&true)) {
            (true, false) => Part::Rows,
            (false, true) => Part::Matrices,
            _ => Part::All,
        };
        let (kept, g): (Vec<&Tensor>, _) = ((0..6).map(|i| cx.input(i)).collect(), cx.grad(0));
        let args: Vec<&Tensor> = kept.into_iter().chain([&g]).collect();
        let grads = Tensor::results(Rc::new(ExpertsBackward(part)), &args);
        // Those of x and p come first, if they come.
        let first = if part == Part::Matrices { 0 } else { 2 };
        cx.each(|i| match i {
            0 => grads[0].clone(),
            2 => grads[1].clone(),
            i => grads[first + i - 3].clone(),
        })
    }
}

impl Op for ExpertsBackward {
    fn name(&self) -> &'static str {
        "experts_backward"
    }

    fn signature(&self) -> &str {
        match self.0 {
            Part::All => {
                "..m d!, ..m s!, ..m s!, [e] d! h, [e] d! h, [e] h o!, ..m o! -> ..m d!, ..m s!, [e] d! h, [e] d! h, [e] h o!"
            }
            Part::Rows => "..m d!, ..m s!, ..m s!, [e] d! h, [e] d! h, [e] h o!, ..m o! -> ..m d!, ..m s!",
            Part::Matrices => {
                "..m d!, ..m s!, ..m s!, [e] d! h, [e] d! h, [e] h o!, ..m o! -> [e] d! h, [e] d! h, [e] h o!"
            }
        }
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[6]]
    }

    fn differentiable(&self) -> &'static [bool] {
        &[true, false]
    }

    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        Ok(SmallVec::from_elem(inputs[0], num_outputs))
    }

    fn volume(&self, _: usize, args: &[&Layout], _: &[Layout]) -> usize {
        volume(args).saturating_mul(2)
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        let (rank, pairs) = (local.rank, Pairs::of(local, x[1])?);
        let (rows, g) = (pairs.rows_of(&as_rows(rank, x[0])?)?, pairs.rows_of(&as_rows(rank, x[6])?)?);
        let (gate, up) = (pairs.product(&rows, x[3])?, pairs.product(&rows, x[4])?);
        let hidden = pairs.both(&swiglu::FORWARD, &gate, &up)?;
        let (p, back) = (pairs.ordered(x[2])?, pairs.product(&g, &turned(x[5]))?);
        let dh = pairs.scaled(&back, &p)?;
        let [mut dgate, mut dup] = [gate.alike(rank, gate.dtype)?, up.alike(rank, up.dtype)?];
        launch(rank, &swiglu::BACKWARD, &[&gate, &up, &dh], &mut [&mut dgate, &mut dup], &[])?;
        let mut outputs: Pieces =
            (0..local.inference.outputs.len()).map(|i| local.output(i)).collect::<Result<_>>()?;
        let (of_rows, of_matrices) = outputs.split_at_mut(if self.0 == Part::Matrices { 0 } else { 2 });
        if let [dx, dp] = of_rows {
            let (a, b) = (pairs.product(&dgate, &turned(x[3]))?, pairs.product(&dup, &turned(x[4]))?);
            pairs.sums(&pairs.both(&ADD, &a, &b)?, dx)?;
            let found = pairs.in_order_of_rows(&pairs.dots(&hidden, &back)?)?;
            *dp = Piece { lineage: dp.lineage, ..found.viewed(dp.view.clone()) };
        }
        if let [dwg, dwu, dwd] = of_matrices {
            pairs.gradient(&rows, &dgate, dwg)?;
            pairs.gradient(&rows, &dup, dwu)?;
            pairs.gradient(&pairs.scaled(&hidden, &p)?, &g, dwd)?;
        }
        Ok(outputs)
    }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |rows: &[usize], per_row: usize, [e, d, h, o]: [usize; 4]| {
        let of = |last: usize| [rows, &[last]].concat();
        let real = Input::real;
        let inputs = vec![
            real(&of(d)),
            Input::index(&of(per_row), e),
            real(&of(per_row)),
            real(&[e, d, h]),
            real(&[e, d, h]),
            real(&[e, h, o]),
        ];
        Case::new(Rc::new(Experts), inputs)
    };
    vec![case(&[5], 2, [3, 4, 7, 6]), case(&[2, 3], 1, [5, 4, 7, 6])]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contraction::Contraction;
    use crate::op;
    use shardgrad_dist::{Kind, Mesh, World};
    use std::panic::Location;

    /// Two rows of width 1 and three experts of one hidden unit, whose gate is ln 3: silu(ln 3) is 3/4 of it.
    fn by_hand(rank: &Rank) -> Result<[Tensor; 6]> {
        let unit = 4.0 / (3.0 * 3f64.ln());
        let host = |shape: &[usize], x: &[f64]| Tensor::from_host(rank, shape, x);
        Ok([
            host(&[2, 1], &[1.0, 1.0])?,
            Tensor::from_host(rank, &[2, 2], &[2i64, 0, 0, 1])?,
            host(&[2, 2], &[0.5, 0.25, 1.0, 2.0])?,
            host(&[3, 1, 1], &[3f64.ln(); 3])?,
            host(&[3, 1, 1], &[unit, 2.0 * unit, 4.0 * unit])?,
            host(&[3, 1, 2], &[1.0, 0.0, 0.0, 1.0, 10.0, -1.0])?,
        ])
    }

    #[test]
    fn sums_by_hand() {
        World::run(Mesh::single(), |rank| {
            let [x, index, p, gate, up, down] = by_hand(rank)?;
            let y = x.experts(&index, &p, &gate, &up, &down).to_host::<f64>()?;
            // Experts give 1 (1, 0), 2 (0, 1) and 4 (10, -1).
            let right = [0.5 * 40.0 + 0.25, -2.0, 1.0, 4.0];
            assert!(y.iter().zip(right).all(|(y, right)| (y - right).abs() < 1e-14), "{y:?}");
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn an_index_that_is_no_expert_is_an_error_that_names_it() {
        let error = World::run(Mesh::single(), |rank| {
            let [x, _, p, gate, up, down] = by_hand(rank)?;
            let index = Tensor::from_host(rank, &[2, 2], &[2i64, 0, 3, 1])?;
            let _ = x.experts(&index, &p, &gate, &up, &down);
            Ok(())
        })
        .unwrap_err();
        assert_eq!(error.kind(), Kind::Data);
        assert_eq!(error.message(), "experts: index 3 at position 2 is outside of 0..3");
    }

    #[test]
    fn halves_of_the_backward_pass_form_what_they_are_asked_for() {
        World::run(Mesh::single(), |rank| {
            let real = |shape: &[usize], stream| {
                Tensor::normal(rank, &Layout::invariant(rank.mesh(), DType::F64, shape), 1, stream, 1.0)
            };
            let index = Tensor::from_host(rank, &[3, 2], &[2i64, 0, 0, 1, 2, 1])?;
            let inputs = [
                real(&[3, 4], 0)?,
                index,
                real(&[3, 2], 1)?,
                real(&[3, 4, 5], 2)?,
                real(&[3, 4, 5], 3)?,
                real(&[3, 5, 2], 4)?,
            ];
            let g = real(&[3, 2], 5)?;
            let outputs = op::apply(&Experts, &inputs.each_ref(), &[], Location::caller())?;
            let layouts = |tensors: &[Tensor]| tensors.iter().map(|t| t.layout().clone()).collect::<Vec<_>>();
            let pulled = |wanted: [bool; 6]| -> Vec<Option<Vec<f64>>> {
                let cotangents = Experts.vjp(&Vjp {
                    rank,
                    inputs: &inputs.clone().map(Some),
                    outputs: &[],
                    input_layouts: &layouts(&inputs),
                    output_layouts: &layouts(&outputs),
                    grads: &[Some(g.clone())],
                    wanted: &wanted,
                    taken: std::cell::RefCell::default(),
                    sums: &[],
                });
                cotangents.iter().map(|c| c.as_ref().map(|c| c.to_f64().unwrap())).collect()
            };
            let all = pulled([true, false, true, true, true, true]);
            let rows = pulled([true, false, true, false, false, false]);
            let matrices = pulled([false, false, false, true, true, true]);
            assert_eq!((&rows[0], &rows[2]), (&all[0], &all[2]), "the same bits");
            assert_eq!(matrices[3..], all[3..]);
            assert!(matrices[..3].iter().chain(&rows[3..]).all(Option::is_none));
            Ok(())
        })
        .unwrap();
    }
}
