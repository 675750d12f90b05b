//! Attention over sharded tokens on a tape: values and gradients of the three forms (gathered keys, ring, exchange to heads) against
//! loops on the host, on even, uneven and empty shards, with packed documents; the bits of canonical sums; and the messages of the ring.

use approx::abs_diff_ne;
use shardgrad_autograd::{Tape, Var};
use shardgrad_dist::{Mesh, Rank, Record, Result, World};
use shardgrad_tensor::training_step::canonical_sum::SumTree;
use shardgrad_tensor::{Context, DType, Layout, Resharding, Tensor, Value};
use shardgrad_testing::random_numbers;

/// Rows, key heads, query heads per key head, channels.
const SIZES: [usize; 4] = [2, 2, 2, 3];

/// Which keys a query sees.
#[derive(Clone, Debug)]
struct TestMask {
    causal: bool,
    window: Option<usize>,
    /// Segment ids and positions of the tokens of all rows.
    documents: Option<[Vec<i64>; 2]>,
}

impl TestMask {
    fn by_index(causal: bool, window: Option<usize>) -> TestMask {
        TestMask { causal, window, documents: None }
    }

    fn sees(&self, t: usize, row: usize, i: usize, j: usize) -> bool {
        let (same, i, j) = match &self.documents {
            None => (true, i as i64, j as i64),
            Some([segments, positions]) => {
                let at = |token: usize| row * t + token;
                (segments[at(i)] == segments[at(j)], positions[at(i)], positions[at(j)])
            }
        };
        same && (!self.causal || (j <= i && self.window.is_none_or(|window| i - j < window as i64)))
    }
}

/// A global problem: q `[b, t, g, r, c]`, k and v `[b, t, g, c]`, and the weights of the outputs in the loss.
struct Problem {
    t: usize,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    weights: Vec<f64>,
}

impl Problem {
    fn new(t: usize) -> Problem {
        let [b, g, r, c] = SIZES;
        let (of_queries, of_keys) = (b * t * g * r * c, b * t * g * c);
        Problem {
            t,
            q: random_numbers(1, of_queries).iter().map(|x| 2.0 * x).collect(),
            k: random_numbers(2, of_keys).iter().map(|x| 2.0 * x).collect(),
            v: random_numbers(3, of_keys),
            weights: random_numbers(4, of_queries),
        }
    }

    /// o, dq, dk and dv by loops.
    fn oracle(&self, mask: &TestMask) -> [Vec<f64>; 4] {
        let ([b, g, r, c], t) = (SIZES, self.t);
        let [mut o, mut dq] = [(); 2].map(|()| vec![0.0; self.q.len()]);
        let [mut dk, mut dv] = [(); 2].map(|()| vec![0.0; self.k.len()]);
        let query = |row: usize, i: usize, h: usize| ((row * t + i) * g * r + h) * c;
        let key = |row: usize, j: usize, h: usize| ((row * t + j) * g + h / r) * c;
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        for (row, i, h) in
            (0..b).flat_map(|row| (0..t).flat_map(move |i| (0..g * r).map(move |h| (row, i, h))))
        {
            let at = query(row, i, h);
            let (q, weights) = (&self.q[at..at + c], &self.weights[at..at + c]);
            let seen: Vec<usize> =
                (0..t).filter(|j| mask.sees(t, row, i, *j)).map(|j| key(row, j, h)).collect();
            let scale = 1.0 / (c as f64).sqrt();
            let scores: Vec<f64> = seen.iter().map(|&k| scale * dot(q, &self.k[k..k + c])).collect();
            let sum: f64 = scores.iter().map(|x| x.exp()).sum();
            let probs: Vec<f64> = scores.iter().map(|x| x.exp() / sum).collect();
            let d_probs: Vec<f64> = seen.iter().map(|&k| dot(weights, &self.v[k..k + c])).collect();
            let mean = dot(&probs, &d_probs);
            for ((&k, p), d_prob) in seen.iter().zip(&probs).zip(&d_probs) {
                let slope = scale * p * (d_prob - mean);
                for channel in 0..c {
                    o[at + channel] += p * self.v[k + channel];
                    dq[at + channel] += slope * self.k[k + channel];
                    dk[k + channel] += slope * q[channel];
                    dv[k + channel] += p * weights[channel];
                }
            }
        }
        [o, dq, dk, dv]
    }
}

/// How queries meet the keys of other ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Gather,
    Ring,
    Exchange,
}

/// The layouts of queries and keys, `cp` the axes of tokens, `tp` those of heads, `dp` those of rows, each with its `@`.
struct Sharding {
    mesh: Mesh,
    cp: &'static str,
    tp: &'static str,
    dp: &'static str,
}

impl Sharding {
    fn new(mesh: &str, cp: &'static str, tp: &'static str, dp: &'static str) -> Sharding {
        Sharding { mesh: Mesh::parse(mesh).unwrap(), cp, tp, dp }
    }

    /// The layout of queries or keys, with tokens or heads sharded over the axes of tokens.
    fn layout(&self, dtype: DType, t: usize, is_query: bool, by_heads: bool) -> Layout {
        let ([b, g, r, c], Sharding { cp, tp, dp, .. }) = (SIZES, self);
        let (of_tokens, of_heads) = if by_heads { ("", *cp) } else { (*cp, "") };
        let query_heads = if is_query { format!("{r}, ") } else { String::new() };
        let text = format!("{dtype}[{b}{dp}, {t}{of_tokens}, {g}{tp}{of_heads}, {query_heads}{c}]");
        Layout::parse(&text, &self.mesh).unwrap()
    }
}

/// o, dq, dk and dv of a form on a rank, all gathered.
fn attend(
    rank: &Rank,
    problem: &Problem,
    mask: &TestMask,
    sharding: &Sharding,
    form: Form,
    dtype: DType,
) -> Result<[Vec<f64>; 4]> {
    let t = problem.t;
    let tape = Tape::new(rank);
    let layout = |is_query, by_heads| sharding.layout(dtype, t, is_query, by_heads);
    let distributed = |layout: &Layout, data: &[f64]| -> Result<Tensor> {
        Ok(Tensor::from_global(rank, &layout.with_dtype(DType::F64), data)?.cast(dtype))
    };
    let leaf = |key: u64, is_query, data: &[f64]| -> Result<Var> {
        Ok(tape.leaf(key, &distributed(&layout(is_query, false), data)?))
    };
    let (q, k, v) = (leaf(1, true, &problem.q)?, leaf(2, false, &problem.k)?, leaf(3, false, &problem.v)?);
    let axes: Vec<&str> = sharding.cp.split('@').skip(1).collect();
    let gathered = |x: &Var| {
        axes.iter().rev().fold(x.clone(), |x, axis| {
            let axis = sharding.mesh.axis(axis).expect("an axis of tokens");
            x.to_layout(&x.layout().with_placement(axis, shardgrad_tensor::Placement::Replicate))
        })
    };
    let by_heads = form == Form::Exchange;
    let (q, k, v) = match form {
        Form::Ring => (q, k, v),
        Form::Gather => (q, gathered(&k), gathered(&v)),
        Form::Exchange => {
            let (of_queries, of_keys) = (layout(true, true), layout(false, true));
            (q.to_layout(&of_queries), k.to_layout(&of_keys), v.to_layout(&of_keys))
        }
    };
    let o = match (&mask.documents, mask.window) {
        (Some(documents), window) => {
            let of_rows = Layout::parse(&format!("i64[{}{}, {t}]", SIZES[0], sharding.dp), &sharding.mesh)?;
            let [segments, positions] =
                [0, 1].map(|i| Tensor::from_global(rank, &of_rows, &documents[i]).map(|x| tape.constant(x)));
            q.document_attention(&k, &v, [&segments?, &positions?], mask.causal, window)
        }
        (None, Some(window)) => q.window_attention(&k, &v, window),
        (None, None) => q.attention(&k, &v, mask.causal),
    };
    let o = if by_heads { o.to_layout(&layout(true, false)) } else { o };
    assert_eq!(o.layout(), &layout(true, false), "{form:?}");
    let weights = tape.constant(distributed(&layout(true, false), &problem.weights)?);
    o.mul(&weights).cast(dtype.accumulator()).sum().backward()?;
    let gradients = tape.gradients();
    let all = [o.tensor(), &gradients[&1], &gradients[&2], &gradients[&3]].map(Tensor::to_f64);
    let all: Vec<Vec<f64>> = all.into_iter().collect::<Result<_>>()?;
    Ok(all.try_into().expect("four tensors"))
}

/// Documents whose borders are those of no shard, in `b` rows of `t` tokens: segment ids and positions.
fn documents(t: usize, lengths: &[usize]) -> [Vec<i64>; 2] {
    let of_row = |row: usize| {
        let ends = lengths.iter().cycle().skip(row);
        let tokens = ends.enumerate().flat_map(|(i, len)| (0..*len).map(move |at| [i as i64 % 3, at as i64]));
        tokens.take(t).collect::<Vec<_>>()
    };
    let all: Vec<[i64; 2]> = (0..SIZES[0]).flat_map(of_row).collect();
    [0, 1].map(|i| all.iter().map(|ids| ids[i]).collect())
}

/// An order in which each of `n` shards holds a chunk from the head and one from the tail.
fn zigzag(t: usize, n: usize) -> Vec<usize> {
    let start = |chunk: usize| chunk * t / (2 * n);
    let chunks = (0..n).flat_map(|shard| [shard, 2 * n - 1 - shard]);
    chunks.flat_map(|chunk| start(chunk)..start(chunk + 1)).collect()
}

fn masks(t: usize) -> Vec<TestMask> {
    let documents = documents(t, &[3, 1, 4]);
    let one =
        [vec![0; SIZES[0] * t], zigzag(t, 3).iter().map(|&p| p as i64).collect::<Vec<_>>().repeat(SIZES[0])];
    let with =
        |causal, window, ids: &[Vec<i64>; 2]| TestMask { causal, window, documents: Some(ids.clone()) };
    vec![
        TestMask::by_index(false, None),
        TestMask::by_index(true, None),
        TestMask::by_index(true, Some(2)),
        with(true, None, &documents),
        with(false, None, &documents),
        with(true, Some(2), &documents),
        with(true, None, &one),
    ]
}

fn find_difference(found: &[Vec<f64>; 4], expected: &[Vec<f64>; 4], bound: f64) -> Option<String> {
    let names = ["o", "dq", "dk", "dv"];
    names.iter().zip(found.iter().zip(expected)).find_map(|(name, (found, expected))| {
        let is_far = |(f, e): (&f64, &f64)| abs_diff_ne!(f, e, epsilon = bound * (1.0 + e.abs()));
        let at = found.iter().zip(expected).position(is_far)?;
        Some(format!("{name}, element {at}: {} instead of {}", found[at], expected[at]))
    })
}

#[test]
fn every_form_matches_loops_on_every_sharding() {
    let shardings = [
        ("cp=2", "@cp", "", ""),
        ("cp=3", "@cp", "", ""),
        ("cp=4", "@cp", "", ""),
        ("cp=2,tp=2", "@cp", "@tp", ""),
        ("dp=2,cp=3", "@cp", "", "@dp"),
        ("dp=2,cp=2,tp=2", "@cp", "@tp", "@dp"),
        ("a=2,b=3", "@a@b", "", ""),
        ("a=2,b=3", "@b@a", "", ""),
    ];
    for (mesh, cp, tp, dp) in shardings {
        let sharding = Sharding::new(mesh, cp, tp, dp);
        // Even and uneven shards, empty ones at the beginning and between, and one token.
        let problems = [12, 7, 2, 1].map(Problem::new);
        let cases: Vec<(&Problem, TestMask, [Vec<f64>; 4])> = problems
            .iter()
            .flat_map(|problem| masks(problem.t).into_iter().map(move |mask| (problem, mask)))
            .map(|(problem, mask)| (problem, mask.clone(), problem.oracle(&mask)))
            .collect();
        let ran = World::run(sharding.mesh.clone(), |rank| {
            for (problem, mask, expected) in &cases {
                for form in [Form::Ring, Form::Gather, Form::Exchange] {
                    let found = attend(rank, problem, mask, &sharding, form, DType::F64)?;
                    let difference = find_difference(&found, expected, 1e-12);
                    let t = problem.t;
                    assert!(difference.is_none(), "{form:?}, {t} tokens, {mask:?}: {difference:?}");
                }
            }
            Ok(())
        });
        ran.unwrap_or_else(|e| panic!("{mesh} {cp}: {e}"));
    }
}

#[test]
fn narrow_dtypes_are_merged_in_the_accumulator() {
    let (problem, mask) = (Problem::new(24), TestMask::by_index(true, None));
    let expected = problem.oracle(&mask);
    for (dtype, bound) in [(DType::F32, 2e-6), (DType::F16, 2e-3), (DType::BF16, 1.5e-2)] {
        let found = ["cp=1", "cp=2", "cp=6"].map(|mesh| {
            let sharding = Sharding::new(mesh, "@cp", "", "");
            let attend = |rank: &Rank| attend(rank, &problem, &mask, &sharding, Form::Ring, dtype);
            World::run(sharding.mesh.clone(), attend).unwrap().remove(0)
        });
        for (found, expected) in found.iter().flat_map(|found| found.iter().zip(&expected)) {
            let far = found.iter().zip(expected).map(|(f, e)| (f - e).abs() / (1.0 + e.abs()));
            assert!(far.fold(0.0, f64::max) < bound, "{dtype}");
        }
        // Sums in the accumulator are rounded once, on one rank as on many: few numbers differ. Kernels of bf16 also round the weights of
        // a chunk, relative to its largest score.
        let [one, _, many] = &found;
        for (name, (one, many)) in ["o", "dq", "dk", "dv"].iter().zip(one.iter().zip(many)) {
            let differ = one.iter().zip(many).filter(|(one, many)| one != many).count();
            assert!(dtype != DType::F16 || differ * 20 < one.len(), "{differ} of {} of {name}", one.len());
        }
    }
}

#[test]
fn gathered_and_exchanged_keys_have_the_bits_of_one_rank_where_sums_are_canonical() {
    let bits = |mesh: &str, form: Form, tree: Option<SumTree>, dtype: DType| {
        let sharding = Sharding::new(mesh, "@cp", "", "");
        // Tiles of queries in strips and not, empty leaves, and leaves whose borders are not those of tiles.
        let problems = [5, 19, 300].map(Problem::new);
        let ranks = World::run(sharding.mesh.clone(), |rank| {
            let _tree = Context::of(rank).set_sum_tree(tree);
            let mut all = Vec::new();
            for problem in &problems {
                for mask in &masks(problem.t)[1..5] {
                    all.extend(attend(rank, problem, mask, &sharding, form, dtype)?);
                }
            }
            Ok(all.concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>())
        });
        ranks.map(|mut ranks| ranks.swap_remove(0))
    };
    let tree = Some(SumTree::new(8));
    for dtype in [DType::F32, DType::BF16] {
        let alone = bits("cp=1", Form::Gather, tree, dtype).unwrap();
        for mesh in ["cp=2", "cp=4", "cp=8"] {
            for form in [Form::Gather, Form::Exchange] {
                assert!(bits(mesh, form, tree, dtype).unwrap() == alone, "{dtype}, {form:?} on {mesh}");
            }
        }
        let plain = |mesh| bits(mesh, Form::Gather, None, dtype).unwrap();
        assert!(plain("cp=4") != plain("cp=1"), "{dtype}: without canonical sums the ranks decide the order");
    }
    let error = bits("cp=2", Form::Ring, tree, DType::F32).unwrap_err();
    assert!(error.to_string().contains("ring_attention adds terms of several ranks"), "{error}");
}

/// The records of a rank, forward and backward.
fn traced(mesh: &str, t: usize, form: Form, dtype: DType) -> Vec<Record> {
    let (problem, mask) = (Problem::new(t), TestMask::by_index(true, None));
    let sharding = Sharding::new(mesh, "@cp", "", "");
    let records = World::run(sharding.mesh.clone(), |rank| {
        let tape = Tape::new(rank);
        let leaf = |key, is_query, data: &[f64]| -> Result<Var> {
            let layout = sharding.layout(dtype, t, is_query, false);
            Ok(tape.leaf(key, &Tensor::from_global(rank, &layout.with_dtype(DType::F64), data)?.cast(dtype)))
        };
        let (q, k, v) =
            (leaf(1, true, &problem.q)?, leaf(2, false, &problem.k)?, leaf(3, false, &problem.v)?);
        rank.trace().enable();
        let by_heads = |x: &Var, is_query| x.to_layout(&sharding.layout(dtype, t, is_query, true));
        let o = match form {
            Form::Exchange => {
                let o = by_heads(&q, true).attention(&by_heads(&k, false), &by_heads(&v, false), mask.causal);
                o.to_layout(&sharding.layout(dtype, t, true, false))
            }
            _ => q.attention(&k, &v, mask.causal),
        };
        o.sum().backward()?;
        // The adjoints of changes of layout of leaves.
        assert_eq!(tape.gradients().len(), 3);
        rank.trace().disable();
        Ok(rank.trace().take())
    });
    records.unwrap().remove(0)
}

#[test]
fn the_ring_moves_as_many_bytes_as_its_formula() {
    // Elements of k or v of all tokens.
    let keys = |t: usize| (SIZES[0] * t * SIZES[1] * SIZES[3]) as u64;
    for (mesh, n, t) in [("cp=2", 2, 12), ("cp=3", 3, 12), ("cp=4", 4, 12), ("cp=6", 6, 12)] {
        for (dtype, size, wide) in [(DType::F64, 8, 8), (DType::F32, 4, 4), (DType::BF16, 2, 4)] {
            let records = traced(mesh, t, Form::Ring, dtype);
            let of = |op: &str, phase: &str, dtype: DType| {
                let of = |r: &&Record| r.op == op && format!("{:?}", r.phase) == phase && r.dtype == dtype;
                let list: Vec<&Record> = records.iter().filter(of).filter(|r| r.bytes > 0).collect();
                (list.len(), list.iter().map(|r| r.bytes).sum::<u64>())
            };
            // k and v: (n - 1) / n of each, in each direction.
            let moved = 2 * keys(t) / n * (n - 1);
            for op in ["send", "recv"] {
                assert_eq!(of(op, "Forward", dtype), (n as usize - 1, moved * size), "{mesh} {dtype} {op}");
            }
            let sums = dtype.accumulator();
            let (count, bytes) = of("send", "Backward", dtype);
            match dtype == sums {
                // dk and dv travel in the same dtype.
                true => assert_eq!((count, bytes), (2 * (n as usize - 1), 2 * moved * size)),
                false => {
                    assert_eq!((count, bytes), (n as usize - 1, moved * size));
                    assert_eq!(of("send", "Backward", sums), (n as usize - 1, moved * wide));
                }
            }
            assert!(records.iter().all(|r| r.op == "send" || r.op == "recv"), "{records:?}");
        }
    }
}

#[test]
fn the_exchange_moves_as_many_bytes_as_its_formula() {
    // Both key heads are on a rank of their own.
    let records = traced("cp=2", 12, Form::Exchange, DType::F64);
    let [b, g, r, c] = SIZES.map(|n| n as u64);
    let keys = 8 * b * 12 * g * c;
    let lines: Vec<(&str, String, u64)> =
        records.iter().map(|record| (record.op, format!("{:?}", record.phase), record.bytes)).collect();
    // A rank keeps half of its half.
    let (of_keys, of_queries) = (keys / 4, keys * r / 4);
    let line = |phase: &str, bytes| ("all_to_all", phase.to_string(), bytes);
    let mut expected =
        [of_queries, of_keys, of_keys, of_queries].map(|bytes| line("Forward", bytes)).to_vec();
    expected.extend([of_queries, of_keys, of_keys, of_queries].map(|bytes| line("Backward", bytes)));
    assert_eq!(lines, expected);
}

#[test]
fn a_rank_holds_at_most_two_chunks_of_others() {
    // k and v of a shard: large compared with everything else.
    let (n, t, c) = (8, 64, 4096);
    let chunk = (t / n * 2 * c * 8) as u64;
    let mesh = Mesh::parse("cp=8").unwrap();
    let peaks = |slow: Option<usize>, is_trained: bool| {
        let peaks = World::run(mesh.clone(), |rank| {
            let layout = Layout::parse(&format!("f64[1, {t}@cp, 1, {c}]"), rank.mesh())?;
            let tape = Tape::new(rank);
            let leaf = |seed| -> Result<Var> {
                Ok(tape.leaf(seed, &Tensor::uniform(rank, &layout, seed, 0, -1.0, 1.0)?))
            };
            let (q, k, v) = (leaf(1)?, leaf(2)?, leaf(3)?);
            let given = rank.backend().memory().in_use_bytes;
            if slow == Some(rank.index()) {
                // The other ranks are as far ahead as the ring lets them.
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
            let o = q.attention(&k, &v, true);
            if is_trained {
                o.sum().backward()?;
            }
            Ok((rank.backend().memory().peak_bytes - given) as u64)
        });
        peaks.unwrap()
    };
    for slow in [None, Some(0), Some(3)] {
        // Forward: o, a partial o, and chunks. Backward: o, its cotangent, dq, dk, dv, a term of dq, chunks and their cotangents.
        for (is_trained, own, others) in [(false, chunk, 2), (true, 3 * chunk, 2 + 2)] {
            for (rank, peak) in peaks(slow, is_trained).into_iter().enumerate() {
                let most = own + others * chunk + (1 << 17);
                assert!(peak <= most, "rank {rank} of {slow:?}: {peak} bytes, a chunk has {chunk}");
            }
        }
    }
}
