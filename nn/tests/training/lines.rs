//! Misuse of models and trainers is refused where it happens, with the line of who did it.

use crate::support::run;
use shardgrad_nn::layer::Linear;
use shardgrad_nn::{Model, Optimizer, Plan, Sgd};
use shardgrad_tensor::{Error, Kind, Tensor, Value};

fn is_of_this_file(error: &Error) -> bool {
    error.site().is_some_and(|s| s.file() == file!())
}

#[test]
fn gradients_of_another_model_are_refused() {
    for mesh in ["", "dp=2"] {
        run(mesh, |rank| {
            let [first, second] = [1, 2].map(|seed| Model::new(rank, Linear::new(3, 2), &Plan::new(), seed));
            let (first, second) = (first?, second?);
            let tape = first.tape();
            let x = tape.constant(Tensor::from_host(rank, &[1, 3], &[1.0f32, 2.0, 3.0])?);
            first.forward(&x).square().sum().backward()?;
            let gradients = tape.gradients();
            let before = first.weight.tensor().to_f64()?;
            let error = Sgd::new(0.1).update(&second, gradients.clone()).unwrap_err();
            assert_eq!(error.message(), "2 of 2 gradients are of no parameter of this model");
            assert!(error.kind() == Kind::Config && is_of_this_file(&error), "{error}");
            // Some of its own make up for none.
            second.forward(&tape.constant(x.tensor().clone())).square().sum().backward()?;
            let both = gradients.iter().map(|(key, g)| (*key, g.clone())).chain(tape.gradients()).collect();
            let error = Sgd::new(0.1).update(&second, both).unwrap_err();
            assert_eq!(error.message(), "2 of 4 gradients are of no parameter of this model");
            // None at all leave all as it is.
            assert!(Sgd::new(0.1).update(&second, tape.gradients())?.applied);
            assert!(Sgd::new(0.1).update(&first, gradients)?.applied);
            assert_ne!(first.weight.tensor().to_f64()?, before);
            Ok(())
        });
    }
}
