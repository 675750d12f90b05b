//! The gated scan on a tape: values and gradients against loops on the host, on sharded steps and lanes, uneven and empty shards.

use approx::relative_eq;
use shardgrad_autograd::{Tape, Var};
use shardgrad_dist::{Mesh, Rank, Result, World};
use shardgrad_tensor::{DType, Layout, Reduction, Resharding, Tensor, Value};
use shardgrad_testing::random_numbers;

const ROWS: usize = 3;
const CHANNELS: usize = 4;

/// h, da and dx of the recurrence over the middle dim for the cotangent g, by loops.
fn oracle(steps: usize, a: &[f64], x: &[f64], g: &[f64]) -> [Vec<f64>; 3] {
    let [mut h, mut da, mut dx] = [(); 3].map(|()| vec![0.0; a.len()]);
    for (row, channel) in (0..ROWS).flat_map(|row| (0..CHANNELS).map(move |channel| (row, channel))) {
        let at = |t: usize| (row * steps + t) * CHANNELS + channel;
        let mut state = 0.0;
        for t in 0..steps {
            state = a[at(t)] * state + x[at(t)];
            h[at(t)] = state;
        }
        let mut carry = 0.0;
        for t in (0..steps).rev() {
            dx[at(t)] = g[at(t)] + carry;
            da[at(t)] = dx[at(t)] * if t == 0 { 0.0 } else { h[at(t - 1)] };
            carry = a[at(t)] * dx[at(t)];
        }
    }
    [h, da, dx]
}

/// A global tensor in a layout, by a route: the shards of a partial sum differ.
fn distributed(rank: &Rank, layout: &Layout, data: &[f64]) -> Result<Tensor> {
    let shape = layout.shape();
    Ok(Tensor::from_host(rank, &shape, data)?.cast(layout.dtype()).to_layout(layout))
}

fn assert_near(what: &str, dtype: DType, got: &[f64], want: &[f64]) {
    let bound = if dtype == DType::F64 { 1e-13 } else { 2e-6 };
    let is_near = relative_eq!(got, want, epsilon = bound, max_relative = bound);
    assert!(is_near, "{what}: {got:?} instead of {want:?}");
}

#[test]
fn values_and_gradients_match_loops_on_every_layout() {
    for (mesh, layouts) in [
        ("t=2", &["@t, {s}, 4", "3, {s}@t, 4", "3, {s}, 4@t"][..]),
        ("t=5", &["3, {s}@t, 4"]),
        ("t=2,u=3", &["3, {s}@t@u, 4", "3, {s}@u@t, 4", "3@u, {s}@t, 4", "3, {s}@u, 4@t", "3, {s}@t, 4"]),
    ] {
        let mesh = Mesh::parse(mesh).unwrap();
        // Fewer steps than ranks leave shards empty, at the beginning, the end and between.
        for (steps, text) in
            [0, 1, 2, 4, 13, 37].into_iter().flat_map(|s| layouts.iter().map(move |l| (s, l)))
        {
            let text = text.replace("{s}", &steps.to_string());
            let text = if text.starts_with('@') { format!("{ROWS}{text}") } else { text };
            let numel = ROWS * steps * CHANNELS;
            let [a, x, w] = [1, 2, 3].map(|seed| random_numbers(seed, numel));
            let right = oracle(steps, &a, &x, &w);
            for (dtype, partial) in [("f64", ""), ("f32", ""), ("f64", " +u")] {
                let is_free = mesh.axis("u").is_some() && !text.contains("@u");
                if !partial.is_empty() && !is_free {
                    continue;
                }
                let what = format!("{dtype}[{text}]{partial} on {mesh}");
                World::run(mesh.clone(), |rank| {
                    let plain = Layout::parse(&format!("{dtype}[{text}]"), &mesh)?;
                    let of_x = Layout::parse(&format!("{dtype}[{text}]{partial}"), &mesh)?;
                    let tape = Tape::new(rank);
                    let leaf = |key, layout: &Layout, data: &[f64]| -> Result<Var> {
                        Ok(tape.leaf(key, &distributed(rank, &plain, data)?).to_layout(layout))
                    };
                    let (a, x) = (leaf(1, &plain, &a)?, leaf(2, &of_x, &x)?);
                    let h = x.gated_scan(&a, 1);
                    assert_eq!(h.layout(), &of_x, "{what}");
                    assert_near(&what, plain.dtype(), &h.tensor().to_f64()?, &right[0]);
                    h.mul(&tape.constant(distributed(rank, &plain, &w)?)).sum().backward()?;
                    let gradients = tape.gradients();
                    assert_near(&format!("da, {what}"), plain.dtype(), &gradients[&1].to_f64()?, &right[1]);
                    assert_near(&format!("dx, {what}"), plain.dtype(), &gradients[&2].to_f64()?, &right[2]);
                    Ok(())
                })
                .unwrap_or_else(|e| panic!("{what}: {e}"));
            }
        }
    }
}

#[test]
fn constant_gates_save_no_result() {
    let mesh = Mesh::parse("t=3").unwrap();
    let [a, x, w] = [1, 2, 3].map(|seed| random_numbers(seed, ROWS * 7 * CHANNELS));
    let right = oracle(7, &a, &x, &w);
    World::run(mesh.clone(), |rank| {
        let layout = Layout::parse("f64[3, 7@t, 4]", &mesh)?;
        let tape = Tape::new(rank);
        let gates = tape.constant(Tensor::from_global(rank, &layout, &a)?);
        let h = tape.leaf(2, &distributed(rank, &layout, &x)?).gated_scan(&gates, 1);
        let local_bytes = h.tensor().local().numel() * 8;
        assert_eq!(tape.saved_bytes(), local_bytes, "only the gates are saved");
        h.mul(&tape.constant(distributed(rank, &layout, &w)?)).sum().backward()?;
        assert_near("dx", DType::F64, &tape.gradients()[&2].to_f64()?, &right[2]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    let bits = |threads| {
        let mesh = Mesh::parse("t=2").unwrap();
        let results = World::new(mesh.clone()).threads(threads).launch(|rank| {
            let layout = Layout::parse("f32[2, 9001@t, 3]", &mesh)?;
            let tape = Tape::new(rank);
            let values = |seed| Tensor::uniform(rank, &layout, seed, 0, -1.0, 1.0);
            let (a, x) = (tape.leaf(1, &values(1)?), tape.leaf(2, &values(2)?));
            let h = x.gated_scan(&a, 1);
            h.square().sum().backward()?;
            let gradients = tape.gradients();
            let all = [h.tensor(), &gradients[&1], &gradients[&2]].map(Tensor::to_f64);
            let all = all.into_iter().collect::<Result<Vec<_>>>()?.concat();
            Ok(all.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
        });
        results.unwrap().remove(0)
    };
    let one = bits(1);
    assert!(bits(2) == one && bits(3) == one);
}
