//! Activations that the backward pass gathers again: their gathers begin before the product that runs before their use.

use shardgrad_autograd::{Tape, Var};
use shardgrad_dist::{Mesh, Record, Result, World};
use shardgrad_tensor::{
    Cotangents, ForwardContext, Layout, LocalTensor, LocalTensors, Op, Tensor, Value, Vjp,
};
use std::cell::RefCell;
use std::rc::Rc;

/// The names of the probes that ran backward, each with the collectives since the one before.
type Log = Rc<RefCell<Vec<(&'static str, Vec<Record>)>>>;

/// The identity, whose vjp logs the collectives that were issued before it.
#[derive(Debug)]
struct Probe(&'static str, Log);

impl Op for Probe {
    fn name(&self) -> &'static str {
        "probe"
    }

    fn signature(&self) -> &str {
        "..m -> ..m"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn forward(&self, _: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        Ok([x[0].clone()].into_iter().collect())
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        self.1.borrow_mut().push((self.0, cx.rank.trace().take()));
        cx.cotangents(|_| cx.grad(0).clone())
    }
}

/// The gathers before each probe of the backward pass of probes around products; of the function that follows the gathered value.
fn gathers_before_probes(
    rest: impl Fn(&Var, &Var, &dyn Fn(&'static str, &Var) -> Var) -> Var + Sync,
) -> Vec<(&'static str, usize)> {
    let run = World::run(Mesh::parse("tp=2").unwrap(), |rank| {
        let parse = |text| Layout::parse(text, rank.mesh());
        let tape = Tape::new(rank);
        let x = tape.leaf(1, &Tensor::full(rank, &parse("f64[8@tp, 6]")?, 0.5)?);
        let w = tape.leaf(2, &Tensor::full(rank, &parse("f64[6, 6]")?, 0.25)?);
        let log = Log::default();
        let probe = |name, x: &Var| Var::apply_one(Rc::new(Probe(name, log.clone())), &[x]);
        let gathered = x.to_regathered_layout_at(&parse("f64[8, 6] ~tp")?, std::panic::Location::caller());
        let loss = rest(&gathered, &w, &probe).sum();
        rank.trace().enable();
        loss.backward()?;
        let gathers = |records: &[Record]| records.iter().filter(|r| r.op == "all_gather").count();
        Ok(log.borrow().iter().map(|(name, records)| (*name, gathers(records))).collect::<Vec<_>>())
    });
    run.unwrap().swap_remove(0)
}

#[test]
fn a_gather_begins_before_the_product_that_runs_before_its_use() {
    let probes = gathers_before_probes(|x, w, probe| {
        let first = probe("before use", &x.matmul(w));
        probe("before product", &probe("after product", &first.gelu()).matmul(w).gelu())
    });
    // Backward: the product of the second layer, then the elementwise ops, then the product that needs the gathered value.
    assert_eq!(probes, [("before product", 0), ("after product", 1), ("before use", 0)]);
}

#[test]
fn without_a_product_a_gather_begins_one_op_ahead() {
    let probes =
        gathers_before_probes(|x, w, probe| probe("two ahead", &probe("one ahead", &x.matmul(w))).square());
    assert_eq!(probes, [("two ahead", 0), ("one ahead", 1)]);
}
