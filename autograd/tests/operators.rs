//! Operators on variables: values, gradients, layouts, and the line that errors name.

use shardgrad_autograd::{Tape, Var};
use shardgrad_dist::{Kind, Mesh, Result, World};
use shardgrad_tensor::{Layout, Tensor, Value};

#[test]
fn gradients_of_an_expression_match_hand_computed_ones() {
    for mesh in ["a=1", "a=2", "a=3"] {
        let mesh = Mesh::parse(mesh).unwrap();
        World::run(mesh.clone(), |rank| {
            let tape = Tape::new(rank);
            let layout = Layout::parse("f64[2@a]", &mesh)?;
            let leaf = |key, values: [f64; 2]| -> Result<Var> {
                Ok(tape.leaf(key, &Tensor::from_global(rank, &layout, &values)?))
            };
            let (a, b) = (leaf(1, [2.0, -1.0])?, leaf(2, [4.0, 0.5])?);
            // y = a b + (1 - a) / b - 3 (-a) / 2: dy/da = b - 1 / b + 3 / 2, dy/db = a - (1 - a) / b^2.
            let y = &a * &b + (1.0 - &a) / &b - 3.0 * -&a / 2.0;
            assert_eq!(y.tensor().to_f64()?, [8.0 - 0.25 + 3.0, -0.5 + 4.0 - 1.5]);
            y.sum().backward()?;
            let gradients = tape.gradients();
            assert_eq!(gradients[&1].to_f64()?, [4.0 - 0.25 + 1.5, 0.5 - 2.0 + 1.5]);
            assert_eq!(gradients[&2].to_f64()?, [2.0 + 1.0 / 16.0, -1.0 - 8.0]);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn errors_name_the_line_of_the_operator() {
    type Case = fn(&Var, &Var) -> Var;
    let cases: [(u32, Case); 6] = [
        (line!(), |a, b| a + b),
        (line!(), |a, b| a.clone() - b),
        (line!(), |a, b| a * &(b * 2.0)),
        (line!(), |a, b| 1.0 / (a / b)),
        (line!(), |a, b| -(a - b.clone())),
        (line!(), |a, b| 2.0 * (a.clone() / b.clone())),
    ];
    for (line, case) in cases {
        let error = World::run(Mesh::single(), |rank| {
            let tape = Tape::new(rank);
            let a = tape.leaf(1, &Tensor::from_host(rank, &[2, 2], &[1.0f32; 4])?);
            let b = tape.leaf(2, &Tensor::from_host(rank, &[3], &[1.0f32; 3])?);
            Ok(case(&a, &b).requires_grad())
        })
        .unwrap_err();
        assert_eq!(error.kind(), Kind::Shape, "{error}");
        let site = error.site().expect("the error has a line");
        assert!(site.file().ends_with("operators.rs") && site.line() == line, "line {line}: {error}");
    }
}
