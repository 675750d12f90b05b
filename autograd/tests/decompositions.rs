//! Fused ops on all layouts of their arguments: kernel or decomposition, with the values and gradients of one rank.

use shardgrad_dist::{Mesh, Result};
use shardgrad_tensor::ops::{Case, Input, OPS};
use shardgrad_tensor::{DType, Layout};
use shardgrad_testing::fuzz::{LayoutPattern, Program, Step, TestInput, ValueRef, Verdict};
use std::thread;

/// The layouts of a tensor on the mesh `a=2`: whole, replicated, partial, and sharded by each dim.
fn patterns(shape: &[usize]) -> Vec<LayoutPattern> {
    let mesh = Mesh::parse("a=2").expect("a mesh");
    let pattern = |sharded: Option<usize>, mark: &str| {
        let dim =
            |(d, extent): (usize, &usize)| format!("{extent}{}", if Some(d) == sharded { "@a" } else { "" });
        let dims: Vec<String> = shape.iter().enumerate().map(dim).collect();
        let layout = Layout::parse(&format!("f64[{}]{mark}", dims.join(", ")), &mesh);
        LayoutPattern::of(&layout.expect("a layout"))
    };
    let whole = ["", " ~a", " +a"].map(|mark| pattern(None, mark));
    whole.into_iter().chain((0..shape.len()).map(|dim| pattern(Some(dim), ""))).collect()
}

/// Programs of one case: at most some 200 of all combinations of layouts.
fn programs(op: &str, number: usize, case: &Case) -> Vec<Program> {
    let choices: Vec<Vec<LayoutPattern>> = case.inputs.iter().map(|input| patterns(input.shape())).collect();
    let count: usize = choices.iter().map(Vec::len).product();
    // Prime to the numbers of choices, 4 to 8, so that each argument gets all of its layouts.
    let step = (count / 200..).find(|step| [2, 3, 5, 7].iter().all(|prime| step % prime != 0)).unwrap_or(1);
    let program = |mut at: usize| {
        let input = |(input, choices): (&Input, &Vec<LayoutPattern>)| {
            let layout = choices[at % choices.len()].clone();
            at /= choices.len();
            TestInput { input: input.clone(), layout, is_leaf: true }
        };
        let inputs: Vec<TestInput> = case.inputs.iter().zip(&choices).map(input).collect();
        let args = (0..inputs.len()).map(ValueRef::Input).collect();
        Program {
            mesh: "a=2".into(),
            dtype: DType::F64,
            inputs,
            steps: vec![Step::Apply { op: op.into(), case: number, args, no_grad: false }],
            blocks: Vec::new(),
            outputs: vec![ValueRef::Output(0, 0)],
            seed: 1,
        }
    };
    (0..count).step_by(step).map(program).collect()
}

/// The numbers of programs of an op that match one rank, and that are refused.
fn right_and_refused(op: &str) -> Result<[usize; 2]> {
    let entry = OPS.iter().find(|entry| entry.name == op).expect("an op of the list");
    let (mut right, mut refused) = (0, 0);
    for (number, case) in (entry.cases)().iter().enumerate() {
        for program in programs(op, number, case) {
            match program.check(OPS)? {
                Verdict::Right => right += 1,
                Verdict::Refused(_) => refused += 1,
                other => panic!("{op}: {other:?}\n{program}"),
            }
        }
    }
    Ok([right, refused])
}

#[test]
fn fused_ops_match_one_rank_on_all_layouts() -> Result<()> {
    // All at once: the two ranks of a program wait for each other most of the time.
    let found = thread::scope(|scope| {
        let ops = ["linear", "mlp", "attention"].map(|op| scope.spawn(move || right_and_refused(op)));
        ops.into_iter().map(|op| op.join().expect("an op returns")).collect::<Result<Vec<_>>>()
    })?;
    // Refused are two labels of the result sharded over one axis, sharded channels of attention, and keys sharded otherwise than queries.
    assert_eq!(
        found,
        [[641, 200], [469, 196], [760, 1846]],
        "right and refused programs of linear, mlp and attention"
    );
    Ok(())
}
