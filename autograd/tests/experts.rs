//! Experts on a tape where pairs are exchanged: values and gradients against loops on the host, the bits of one rank, and the bytes of
//! each collective against closed formulas of a routing.

use shardgrad_autograd::{Tape, Var};
use shardgrad_dist::{Mesh, Phase, Rank, Record, Result, World};
use shardgrad_tensor::op::Point;
use shardgrad_tensor::{Contraction, DType, Element, Layout, Resharding, RowsToExperts, Tensor, Value};
use shardgrad_testing::random_numbers;

/// Widths of rows, hidden units and results.
const D: usize = 4;
const H: usize = 6;
const O: usize = 5;

/// Rows, experts and the experts of each row.
#[derive(Clone, Debug)]
struct Problem {
    /// Rows in two dims.
    rows: [usize; 2],
    num_experts: usize,
    per_row: usize,
    index: Vec<i64>,
}

impl Problem {
    /// Most rows have the same experts, the first and the last expert have none.
    fn skewed(rows: [usize; 2], num_experts: usize, per_row: usize) -> Problem {
        let used = (num_experts as i64 - 2).max(1);
        let count = rows[0] * rows[1] * per_row;
        let expert = |i: usize| {
            let (row, slot) = ((i / per_row) as i64, (i % per_row) as i64);
            (row % 3 * (row % 2) + 2 * slot + 1) % used + i64::from(num_experts > 2)
        };
        Problem { rows, num_experts, per_row, index: (0..count).map(expert).collect() }
    }

    fn num_rows(&self) -> usize {
        self.rows[0] * self.rows[1]
    }

    /// Rows, weights, the three stacks, and the cotangent of the result.
    fn inputs(&self) -> [Vec<f64>; 6] {
        let (n, e) = (self.num_rows(), self.num_experts);
        let counts = [n * D, n * self.per_row, e * D * H, e * D * H, e * H * O, n * O];
        std::array::from_fn(|i| random_numbers(i as u64 + 1, counts[i]))
    }

    /// The result and the gradients of rows, weights and stacks, pair by pair.
    fn oracle(&self) -> [Vec<f64>; 6] {
        let [x, p, wg, wu, wd, g] = self.inputs();
        let mut y = vec![0.0; self.num_rows() * O];
        let [mut dx, mut dp, mut dwg, mut dwu, mut dwd] =
            [&x, &p, &wg, &wu, &wd].map(|all| vec![0.0; all.len()]);
        for (pair, &expert) in self.index.iter().enumerate() {
            let (row, e) = (pair / self.per_row, expert as usize);
            let (at_in, at_out) = (e * D * H, e * H * O);
            let (x, g) = (&x[row * D..][..D], &g[row * O..][..O]);
            let times = |w: &[f64], j: usize| (0..D).map(|i| x[i] * w[at_in + i * H + j]).sum::<f64>();
            for j in 0..H {
                let (a, b) = (times(&wg, j), times(&wu, j));
                let sigmoid = 1.0 / (1.0 + (-a).exp());
                let h = a * sigmoid * b;
                let back: f64 = (0..O).map(|o| g[o] * wd[at_out + j * O + o]).sum();
                for o in 0..O {
                    y[row * O + o] += p[pair] * h * wd[at_out + j * O + o];
                    dwd[at_out + j * O + o] += p[pair] * h * g[o];
                }
                dp[pair] += back * h;
                let dh = p[pair] * back;
                let da = dh * b * sigmoid * (1.0 + a * (1.0 - sigmoid));
                let db = dh * a * sigmoid;
                for i in 0..D {
                    dx[row * D + i] += da * wg[at_in + i * H + j] + db * wu[at_in + i * H + j];
                    dwg[at_in + i * H + j] += da * x[i];
                    dwu[at_in + i * H + j] += db * x[i];
                }
            }
        }
        [y, dx, dp, dwg, dwu, dwd]
    }
}

/// How a problem is sharded: the axes of the two dims of rows, of experts and of hidden units.
#[derive(Clone, Copy, Debug)]
struct Sharding {
    mesh: &'static str,
    rows: [&'static str; 2],
    experts: &'static str,
    hidden: &'static str,
}

const fn by(
    mesh: &'static str,
    rows: [&'static str; 2],
    experts: &'static str,
    hidden: &'static str,
) -> Sharding {
    Sharding { mesh, rows, experts, hidden }
}

const ALONE: Sharding = by("", ["", ""], "", "");

const SHARDINGS: [Sharding; 13] = [
    by("ep=2", ["@ep", ""], "@ep", ""),
    by("ep=3", ["@ep", ""], "@ep", ""),
    by("ep=4", ["@ep", ""], "@ep", ""),
    by("ep=9", ["@ep", ""], "@ep", ""),
    by("ep=2", ["", "@ep"], "@ep", ""),
    by("dp=2,ep=2", ["@dp@ep", ""], "@ep", ""),
    by("dp=2,ep=2", ["@ep@dp", ""], "@ep", ""),
    by("ep=2,dp=3", ["@dp@ep", ""], "@ep", ""),
    by("ep=2,tp=2", ["@ep", ""], "@ep", "@tp"),
    by("dp=2,ep=2,tp=3", ["@dp@ep", ""], "@ep", "@tp"),
    by("ep=3,cp=2", ["@ep", "@cp"], "@ep", ""),
    by("a=2,b=2", ["@a@b", ""], "@a@b", ""),
    by("a=2,b=2", ["@b", "@a"], "@a@b", ""),
];

/// The result and the gradients of rows, weights and stacks, as f64, and the collectives of this rank.
fn run(
    problem: &Problem,
    sharding: Sharding,
    dtype: DType,
    rows: RowsToExperts,
) -> Vec<([Vec<f64>; 6], Vec<Record>)> {
    let (mesh, n, e) = (Mesh::parse(sharding.mesh).unwrap(), problem.rows, problem.num_experts);
    let of_rows = |dtype: DType, width: usize| {
        format!("{dtype}[{}{}, {}{}, {width}]", n[0], sharding.rows[0], n[1], sharding.rows[1])
    };
    let (experts, hidden) = (sharding.experts, sharding.hidden);
    let layouts = [
        of_rows(dtype, D),
        of_rows(dtype, problem.per_row),
        format!("{dtype}[{e}{experts}, {D}, {H}{hidden}]"),
        format!("{dtype}[{e}{experts}, {D}, {H}{hidden}]"),
        format!("{dtype}[{e}{experts}, {H}{hidden}, {O}]"),
        of_rows(dtype, O),
    ];
    World::run(mesh.clone(), |rank| {
        let parse = |text: &str| Layout::parse(text, &mesh);
        let data = problem.inputs();
        let tensors: Vec<Tensor> = (layouts.iter().zip(&data))
            .map(|(text, data)| distributed(rank, &parse(text)?, data))
            .collect::<Result<_>>()?;
        let index = distributed(rank, &parse(&of_rows(DType::I64, problem.per_row))?, &problem.index)?;
        let tape = Tape::new(rank);
        let leaves: Vec<Var> =
            tensors[..5].iter().enumerate().map(|(key, x)| tape.leaf(key as u64, x)).collect();
        let [x, p, gate, up, down] = &leaves[..] else { unreachable!("five leaves") };
        rank.trace().enable();
        let points: [&dyn Point<Var>; 4] = [&(); 4].map(|point| point as &dyn Point<Var>);
        let y = x.experts_general([&tape.constant(index), p], [gate, up, down], rows, points);
        y.mul(&tape.constant(tensors[5].clone())).sum().backward()?;
        rank.trace().disable();
        let records = rank.trace().take();
        let mut gradients = tape.gradients();
        let mut gradient = |key: u64| gradients.remove(&key).expect("a gradient of each leaf").to_f64();
        let results =
            [y.tensor().to_f64()?, gradient(0)?, gradient(1)?, gradient(2)?, gradient(3)?, gradient(4)?];
        Ok((results, records))
    })
    .unwrap_or_else(|error| panic!("{problem:?} on {sharding:?}: {error}"))
}

/// A global tensor in a layout.
fn distributed<T: Element>(rank: &Rank, layout: &Layout, data: &[T]) -> Result<Tensor> {
    let whole = Tensor::from_host(rank, &layout.shape(), data)?;
    Ok(if whole.dtype() == layout.dtype() { whole } else { whole.cast(layout.dtype()) }.to_layout(layout))
}

const NAMES: [&str; 6] = ["y", "dx", "dp", "dwg", "dwu", "dwd"];

#[test]
fn values_and_gradients_match_loops_on_every_sharding() {
    let problems = [
        Problem::skewed([5, 3], 7, 2),
        // Ranks without rows and ranks without experts.
        Problem::skewed([1, 2], 3, 3),
        // All pairs have one expert.
        Problem { index: vec![4; 12], ..Problem::skewed([3, 2], 5, 2) },
        Problem::skewed([4, 4], 1, 1),
        Problem::skewed([0, 3], 4, 2),
    ];
    for problem in problems {
        let right = problem.oracle();
        for sharding in SHARDINGS {
            for rows in [RowsToExperts::AsStated, RowsToExperts::Cheapest] {
                for (rank, (results, _)) in run(&problem, sharding, DType::F64, rows).iter().enumerate() {
                    for (name, (result, right)) in NAMES.iter().zip(results.iter().zip(&right)) {
                        assert_eq!(result.len(), right.len(), "{name}");
                        let worst = result.iter().zip(right).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                        assert!(
                            worst < 1e-12,
                            "{problem:?}, {sharding:?}, {rows:?}, rank {rank}: {name} differs by {worst:e}"
                        );
                    }
                }
            }
        }
    }
}

/// A rank sums the experts of its rows in the order of one rank, and an expert sums its rows in the order of one rank.
#[test]
fn exchanged_pairs_give_the_bits_of_one_rank() {
    let problem = Problem::skewed([7, 3], 7, 4);
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let alone = run(&problem, ALONE, dtype, RowsToExperts::AsStated).remove(0).0;
        for sharding in SHARDINGS.into_iter().filter(|sharding| sharding.hidden.is_empty()) {
            // Gradients of stacks are also summed over the axes that shard rows alone, and over two dims of rows in another order.
            let same = if sharding.rows == ["@ep", ""] && !sharding.mesh.contains(',') { 6 } else { 3 };
            for (results, _) in run(&problem, sharding, dtype, RowsToExperts::AsStated) {
                assert_eq!(results[..same], alone[..same], "{dtype} on {sharding:?}");
            }
        }
    }
}

/// The exchange in the first shard of 8 bytes for each number: pairs of each expert, rows, results; then pairs, rows with
/// cotangents and weights, and the cotangents of rows and weights.
#[test]
fn bytes_of_each_collective_match_closed_formulas() {
    let mut problem = Problem::skewed([7, 2], 7, 3);
    let n = 3;
    let cut = |count: usize, i: usize| i * count / n..(i + 1) * count / n;
    // No row of rank 0 has an expert of rank 1.
    let first = &mut problem.index[..cut(7, 0).len() * 2 * 3];
    first.iter_mut().filter(|e| cut(7, 1).contains(&(**e as usize))).for_each(|e| *e = 6);
    // pairs[i][j]: pairs of the rows of rank i whose expert is on rank j.
    let pairs: Vec<Vec<usize>> = (0..n)
        .map(|i| {
            let rows = cut(7, i);
            let index = &problem.index[rows.start * 2 * 3..rows.end * 2 * 3];
            let on = |j: usize| index.iter().filter(|e| cut(7, j).contains(&(**e as usize))).count();
            (0..n).map(on).collect()
        })
        .collect();
    assert!(pairs.iter().any(|to| to.contains(&0)), "a rank sends no pair to another: {pairs:?}");
    let results = run(&problem, by("ep=3", ["@ep", ""], "@ep", ""), DType::F64, RowsToExperts::AsStated);
    for (i, (_, records)) in results.into_iter().enumerate() {
        let sent: Vec<usize> = pairs[i].clone();
        let received: Vec<usize> = pairs.iter().map(|to| to[i]).collect();
        // Elements sent to each rank, and bytes that leave or reach this rank.
        let exchange = |sent: &[usize], received: &[usize], width: usize| {
            let total = |counts: &[usize]| counts.iter().sum::<usize>() - counts[i];
            let counts: Vec<usize> = sent.iter().map(|count| count * width).collect();
            (counts, (8 * width * total(sent).max(total(received))) as u64)
        };
        let split: Vec<usize> = (0..n).map(|j| cut(7, j).len()).collect();
        let counts = || exchange(&split, &vec![split[i]; n], 1);
        let expected = [
            (Phase::Forward, counts()),
            (Phase::Forward, exchange(&sent, &received, D)),
            (Phase::Forward, exchange(&received, &sent, O)),
            (Phase::Backward, counts()),
            (Phase::Backward, exchange(&sent, &received, D + O + 1)),
            (Phase::Backward, exchange(&received, &sent, D + 1)),
        ];
        let exchanged = records.iter().filter(|r| r.op == "all_to_all");
        let found: Vec<_> = exchanged.map(|r| (r.phase, (r.counts.clone(), r.bytes))).collect();
        assert_eq!(found, expected, "rank {i}");
        let others: Vec<&str> = records.iter().map(|r| r.op).filter(|op| *op != "all_to_all").collect();
        assert_eq!(others, [""; 0], "rank {i}: nothing else is communicated");
    }
}

/// In a dry run, which has no values, each expert gets equally many pairs: the bytes that `explain` lists.
#[test]
fn a_dry_run_assumes_balanced_routing() {
    let mesh = Mesh::parse("ep=4").unwrap();
    for index in 0..4 {
        let records = World::new(mesh.clone()).dry_run(index, |rank| {
            let zeros = |text: &str| Tensor::zeros(rank, &Layout::parse(text, &mesh)?);
            let (x, p) = (zeros("f32[8@ep, 16, 64]")?, zeros("f32[8@ep, 16, 2]")?);
            let (index, up, down) =
                (zeros("i64[8@ep, 16, 2]")?, zeros("f32[8@ep, 64, 32]")?, zeros("f32[8@ep, 32, 64]")?);
            let _ = x.experts(&index, &p, &up, &up, &down);
            Ok(rank.trace().take())
        });
        let bytes: Vec<(&str, u64)> = records.unwrap().iter().map(|r| (r.op, r.bytes)).collect();
        // Of 8 experts 6 are elsewhere; of 32 rows with two experts each, three quarters of the pairs travel.
        let rows = 32 * 2 * 3 / 4 * 64 * 4;
        assert_eq!(bytes, [("all_to_all", 6 * 8), ("all_to_all", rows), ("all_to_all", rows)]);
    }
}
