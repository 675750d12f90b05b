//! What a back end keeps of leaves that several rounds read, and how long.

use shardgrad_autograd::Tape;
use shardgrad_dist::{Mesh, Result, World};
use shardgrad_tensor::{Tensor, Value};

#[test]
fn what_is_kept_for_rounds_goes_with_the_gradients() {
    let run = World::run(Mesh::single(), |rank| {
        let in_use = || rank.backend().memory().in_use_bytes;
        const N: usize = 96;
        let matrix = |shift: usize| {
            let numbers: Vec<f64> = (0..N * N).map(|i| ((i * 7 + shift) % 11) as f64).collect();
            Tensor::from_host(rank, &[N, N], &numbers)
        };
        let (x, w, other) = (matrix(1)?, matrix(2)?, matrix(3)?);
        let bytes = N * N * 8;
        let round = |tape: &Tape, w: &Tensor| -> Result<usize> {
            tape.constant(x.clone()).matmul(&tape.leaf(1, w)).sum().backward()?;
            Ok(in_use())
        };
        let before = in_use();
        for (rounds, kept) in [(1, 0), (2, bytes)] {
            let tape = Tape::new(rank).for_rounds(rounds);
            let first = round(&tape, &w)?;
            assert_eq!(first, before + bytes + kept, "a gradient, and the form of a weight");
            assert_eq!(round(&tape, &w)?, first, "the same in each round");
            assert_eq!(round(&tape, &other)?, first, "that of another tensor takes its place");
            assert_eq!(tape.gradients().len(), 1);
            assert_eq!(in_use(), before, "{rounds} rounds");
            assert_eq!(round(&tape, &w)?, first, "a step on the same tape");
            drop(tape);
            assert_eq!(in_use(), before, "{rounds} rounds");
            let next = Tape::new(rank);
            assert_eq!(round(&next, &w)?, before + bytes, "the next tape is told for itself");
        }
        Ok(())
    });
    run.unwrap();
}
