//! Comparison of the copies that an update uses: losses, gradients and parameters that the layouts call copies are
//! copies, bit for bit.
//!
//! Ranks that compute with different data, where neither the plan nor the layout of the data says so, would train
//! different models, or ignore the data of all ranks but one.

use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::layout::placement::Placement;
use crate::tensor::Tensor;
use crate::training_step::consistency::{NAMES_MAX, differing_replicas, fingerprint, gathered};
use shardgrad_dist::{Error, Kind, Mesh, Rank, Result};
use std::cell::RefCell;
use std::panic::Location;

/// The loss of the newest backward pass of a rank, if other ranks hold copies of it. No tensor, because a tensor holds its
/// rank, which would never be freed.
#[derive(Default)]
struct LastLoss(RefCell<Option<(Layout, LocalTensor)>>);

/// Records the loss of a backward pass for the next [`check_copies`] on its rank. Keeps the scalar alive until then.
pub fn record_loss(loss: &Tensor) {
    let (rank, layout) = (loss.rank(), loss.layout());
    if has_copies(layout) && (loss.has_values() || rank.is_dry_run()) {
        *rank.extension::<LastLoss>().0.borrow_mut() = Some((layout.clone(), loss.local().clone()));
    }
}

/// A parameter before its update.
#[derive(Clone, Debug)]
pub struct UpdatedParam {
    /// The name in error messages.
    pub name: String,
    /// The stored value.
    pub value: Tensor,
    /// The gradient, in the layout of the value.
    pub gradient: Tensor,
}

/// Checks that the copies which an update uses are bit-equal: the loss of the last backward pass, the gradients, the
/// parameters. Costs one read of this rank's parameters and gradients that have copies, and one all-gather of 16 bytes
/// per parameter over the mesh of `rank`. A collective call: every rank passes the same parameters in the same order. Does
/// nothing on one rank; the null back end records the call.
///
/// # Errors
/// `Kind::Diverged`, on every rank, with the parameters and ranks whose copies differ; errors of the device and of the
/// collective.
#[doc(alias = "verify_params_across_processes")]
pub fn check_copies(rank: &Rank, params: &[UpdatedParam], site: &'static Location<'static>) -> Result<()> {
    let loss = rank.extension::<LastLoss>().0.borrow_mut().take();
    let mut layouts: Vec<&Layout> = Vec::with_capacity(2 * params.len() + 1);
    let mut marks: Vec<i64> = Vec::with_capacity(2 * params.len() + 1);
    for tensor in params.iter().flat_map(|p| [&p.gradient, &p.value]) {
        layouts.push(tensor.layout());
        marks.push(if has_copies(tensor.layout()) { fingerprint(&tensor.local_bytes()?) as i64 } else { 0 });
    }
    if let Some((layout, local)) = &loss {
        layouts.push(layout);
        // The null back end has no number.
        let number = local.to_f64(rank)?.first().copied().unwrap_or(0.0);
        marks.push(number.to_bits() as i64);
    }
    let Some(everyone) = gathered(rank, &marks, site)? else { return Ok(()) };
    let differing = differing_replicas(layouts.iter().copied(), &everyone);
    let Some(cause) = Cause::of(&differing, params.len()) else { return Ok(()) };
    Err(cause.error(rank.mesh(), params, &layouts, &differing).at(site))
}

/// Whether several ranks hold each element.
fn has_copies(layout: &Layout) -> bool {
    let mesh = layout.mesh();
    let is_copy = |placement| matches!(placement, Placement::Invariant | Placement::Replicate);
    mesh.axes().any(|a| mesh.size(a) > 1 && is_copy(layout.placement(a)))
}

/// What makes the copies of parameters equal.
const EQUAL_PARAMS_HELP: &str = "build the model with the same seed on every rank, change parameters and set learning rates on every rank alike, or load one checkpoint";

/// What ranks hold different copies of: the first that explains the others.
#[derive(Clone, Copy, PartialEq)]
enum Cause {
    Gradients,
    Loss,
    Params,
}

impl Cause {
    fn of(differing: &[(usize, usize, usize)], num_params: usize) -> Option<Cause> {
        [Cause::Gradients, Cause::Loss, Cause::Params]
            .into_iter()
            .find(|cause| differing.iter().any(|(number, ..)| cause.includes(*number, num_params)))
    }

    /// Whether the tensor of this number belongs to the cause: gradients and parameters alternate, the loss is last.
    fn includes(self, number: usize, num_params: usize) -> bool {
        match self {
            Cause::Loss => number == 2 * num_params,
            Cause::Gradients => number < 2 * num_params && number.is_multiple_of(2),
            Cause::Params => number < 2 * num_params && !number.is_multiple_of(2),
        }
    }

    fn error(
        self,
        mesh: &Mesh,
        params: &[UpdatedParam],
        layouts: &[&Layout],
        differing: &[(usize, usize, usize)],
    ) -> Error {
        let own: Vec<&(usize, usize, usize)> =
            differing.iter().filter(|(number, ..)| self.includes(*number, params.len())).collect();
        let &(number, first, other) = own[0];
        let name = |number: usize| params[number / 2].name.as_str();
        let (count, total) = (own.len(), params.len());
        let text = match self {
            Cause::Gradients => format!(
                "gradients of {count} of {total} parameters differ between ranks that hold copies, `{}` first",
                name(number)
            ),
            Cause::Loss => "the loss differs between ranks that hold copies of it: all data but that of the first rank would be ignored".to_string(),
            Cause::Params => format!(
                "copies of {count} of {total} parameters differ between ranks, `{}` first",
                name(number)
            ),
        };
        let coordinates = [first, other].map(|r| mesh.coordinate(r));
        let differs = |i: &usize| coordinates[0][*i] != coordinates[1][*i];
        let axis = mesh.axes().find(|a| differs(&usize::from(a.0))).map_or("", |a| mesh.name(a));
        let help = match self {
            Cause::Params => EQUAL_PARAMS_HELP.to_string(),
            _ => format!(
                "the ranks of `{axis}` computed with different data: split the batch with Plan::data_parallel(\"{axis}\") and Plan::batch_layout, or pass the same data on every rank"
            ),
        };
        let mut error = Error::new(Kind::Diverged, text);
        if self != Cause::Loss {
            let mut names: Vec<&str> = own.iter().take(NAMES_MAX).map(|(number, ..)| name(*number)).collect();
            if own.len() > NAMES_MAX {
                names.push("...");
            }
            error = error.detail("parameters", names.join(", "));
        }
        let error = error
            .detail("layout", layouts[number].to_string())
            .detail(
                "rank",
                format!("{} holds different bits than rank {}", mesh.describe(other), mesh.describe(first)),
            )
            .detail("help", help);
        let params_differ =
            differing.iter().any(|(number, ..)| Cause::Params.includes(*number, params.len()));
        match params_differ && self != Cause::Params {
            true => error.detail("help", format!("parameters differ too: {EQUAL_PARAMS_HELP}")),
            false => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_dist::World;

    /// The error of a check in which rank `odd` has other numbers in one of gradient, value and loss.
    fn error_with(layout: &str, which: usize, odd: usize) -> Option<String> {
        let mesh = Mesh::parse("a=2,b=2").unwrap();
        let layout = Layout::parse(layout, &mesh).unwrap();
        let ended = World::run(mesh, |rank| {
            let number = |w: usize| if w == which && rank.index() == odd { 2.0 } else { 1.0 };
            let filled = |w: usize, layout: &Layout| {
                let numel = layout.local_shape(rank.coordinates()).iter().product();
                Tensor::from_local(rank, layout, &vec![number(w); numel])
            };
            let gradient = filled(0, &layout)?;
            let params = [UpdatedParam { name: "w".into(), value: filled(1, &layout)?, gradient }];
            record_loss(&filled(2, &Layout::parse("f64[] ~a", rank.mesh())?)?);
            check_copies(rank, &params, Location::caller())?;
            // The loss was taken: the next check does not compare it again.
            assert!(rank.extension::<LastLoss>().0.borrow().is_none());
            Ok(())
        });
        ended.err().map(|e| {
            assert_eq!(e.kind(), Kind::Diverged, "{e}");
            e.to_string()
        })
    }

    #[test]
    fn differing_copies_are_named() {
        for layout in ["f64[4, 2]", "f64[4@a, 2]", "f64[4, 2@b]"] {
            assert_eq!(error_with(layout, 9, 0), None);
            let gradient = error_with(layout, 0, 3).unwrap();
            let text = "gradients of 1 of 1 parameters differ between ranks that hold copies, `w` first";
            assert!(gradient.contains(text) && gradient.contains("3 (a=1, b=1)"), "{gradient}");
            assert!(gradient.contains("Plan::data_parallel(\""), "{gradient}");
            let value = error_with(layout, 1, 2).unwrap();
            assert!(value.contains("copies of 1 of 1 parameters differ between ranks, `w` first"), "{value}");
            assert!(value.contains("build the model with the same seed on every rank"), "{value}");
            assert!(!gradient.contains("parameters differ too"), "{gradient}");
        }
        for which in 0..2 {
            assert_eq!(error_with("f64[4@a, 2@b]", which, 1), None, "shards differ");
        }
        let loss = error_with("f64[4@a, 2@b]", 2, 1).unwrap();
        assert!(loss.contains("the loss differs between ranks that hold copies of it"), "{loss}");
    }
}
