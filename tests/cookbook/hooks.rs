//! Hooks.

use shardgrad::prelude::*;
use std::cell::RefCell;
use std::rc::Rc;

/// Names of points, and the root mean square of an activation or gradient at each.
type Seen = Rc<RefCell<Vec<(String, f64)>>>;

/// Collects what passes the points of a pattern.
pub(super) fn watch(model: &Model<Mlp>, pattern: &str) -> Result<Seen> {
    let seen = Seen::default();
    let note = || {
        let seen = seen.clone();
        move |name: &str, x: &Tensor| {
            seen.borrow_mut().push((name.to_string(), x.square().mean().item()?.sqrt()));
            Ok(())
        }
    };
    model.watch_values(pattern, note())?;
    model.watch_gradients(pattern, note())?;
    Ok(seen) // model.unwatch() removes the hooks.
}

#[test]
fn hooks_see_both_directions() {
    super::on_meshes(|rank| {
        let (model, x) = super::model_and_batch(rank)?;
        let seen = watch(&model, "*.out")?;
        let tape = model.tape();
        model.forward(&tape.constant(x)).square().mean().backward()?;
        let seen = seen.take();
        let names: Vec<&str> = seen.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["c_fc.out", "c_proj.out", "c_proj.out", "c_fc.out"]);
        Ok(seen.iter().map(|(_, rms)| *rms).collect())
    });
}
