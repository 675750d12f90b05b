//! Unification of the labels of an op: the extent, the sharding axes and the grain of each label, agreed on by all
//! arguments.

use crate::layout::dim::Dim;
use crate::layout::refusal::Refusal;
use crate::layout::signature::{Labels, Signature};
use crate::layout::{Layout, gcd};
use shardgrad_dist::{Axis, AxisSet, Mesh};
use smallvec::SmallVec;
use std::sync::Arc;

/// The owner of an axis that shards no label.
const NO_OWNER: u8 = u8::MAX;

/// An argument and one of its dims.
type Place = (u16, u16);

fn pack_place(i: usize, d: usize) -> Place {
    (i as u16, d as u16)
}

fn unpack_place((i, d): Place) -> (usize, usize) {
    (usize::from(i), usize::from(d))
}

/// What is known of one label so far.
#[derive(Clone, Copy)]
struct Label {
    /// The extent, the longest list of axes and its grain.
    dim: Dim,
    /// The argument and dim that gave the extent; `None` while the extent is unknown.
    extent_from: Option<Place>,
    /// The argument and dim that gave the list of axes.
    axes_from: Place,
    /// Whether an argument has the label; otherwise the op creates it, and `extent_from` counts outputs.
    in_args: bool,
}

/// The unified labels of an op on some arguments.
pub(crate) struct Unification {
    pub(crate) labels: Arc<Labels>,
    /// For each mesh axis, the label that it shards in the arguments.
    owners: [u8; Mesh::MAX_AXES],
    /// Axes that shard a created label in the wanted outputs.
    pub(crate) wanted: AxisSet,
    all: SmallVec<[Label; 8]>,
}

impl Unification {
    /// Unifies the labels of all arguments and of the wanted outputs.
    ///
    /// # Errors
    /// Code `shape` for a wrong number of arguments; then `mesh`, `shape`, `one`, `order`, `grain`, `conflict`,
    /// `whole`, checked in this order.
    pub(crate) fn new(
        signature: &Signature,
        args: &[&Layout],
        want: &[Option<&Layout>],
    ) -> Result<Unification, Refusal> {
        if args.len() != signature.num_inputs() {
            let text = format!("{} argument(s) for a signature of {}", args.len(), signature.num_inputs());
            return Err(Refusal::new("shape", text, &[]).hint(
                "pass one argument for each term before `->`, or add the missing terms to Op::signature",
            ));
        }
        check_same_mesh(args, want)?;
        let wanted_ndim = |k: usize| want.get(k).copied().flatten().map(Layout::ndim);
        let labels = signature.bind(|i| args[i].ndim(), wanted_ndim)?;
        let unknown = Label { dim: Dim::unsharded(0), extent_from: None, axes_from: (0, 0), in_args: false };
        let mut unified = Unification {
            owners: [NO_OWNER; Mesh::MAX_AXES],
            wanted: AxisSet::EMPTY,
            all: SmallVec::from_elem(unknown, labels.count()),
            labels,
        };
        unified.extents(args)?;
        unified.axes(args)?;
        unified.assign_owners(args)?;
        unified.check_unsharded(signature, args)?;
        if !want.is_empty() || unified.all.iter().any(|l| !l.in_args) {
            unified.take_created(signature, want)?;
        }
        Ok(unified)
    }

    /// Returns the label that an axis shards in the arguments.
    pub(crate) fn owner(&self, axis: Axis) -> Option<u8> {
        Some(self.owners[axis.0 as usize]).filter(|label| *label != NO_OWNER)
    }

    /// Returns the unified extent, grain and axes of a label.
    pub(crate) fn dim(&self, label: u8) -> Dim {
        if label == Labels::UNIT { Dim::unsharded(1) } else { self.all[label as usize].dim }
    }

    /// Iterates over (label, axis) for the labels that arguments have, in label order.
    pub(crate) fn sharded_axes(&self) -> impl Iterator<Item = (u8, Axis)> {
        let in_args = self.all.iter().enumerate().filter(|(_, label)| label.in_args);
        in_args.flat_map(|(x, label)| label.dim.axes.iter().map(move |a| (x as u8, a)))
    }

    /// Returns the labels and their dims, for the run of the op.
    pub(crate) fn into_labels(self) -> (Arc<Labels>, SmallVec<[Dim; 8]>) {
        (self.labels, self.all.iter().map(|l| l.dim).collect())
    }

    fn extents(&mut self, args: &[&Layout]) -> Result<(), Refusal> {
        for (i, (dim_labels, layout)) in self.labels.inputs().iter().zip(args).enumerate() {
            for (d, (&x, dim)) in dim_labels.iter().zip(layout.dims()).enumerate() {
                if x == Labels::UNIT {
                    if dim.extent != 1 {
                        let n = dim.extent;
                        let text =
                            format!("dim {d} of argument {i} has extent {n}, but the signature requires 1");
                        return Err(Refusal::new("shape", text, &[(i, d)]));
                    }
                    continue;
                }
                let label = &mut self.all[x as usize];
                match label.extent_from {
                    None => {
                        (label.extent_from, label.in_args) = (Some(pack_place(i, d)), true);
                        label.dim = Dim { extent: dim.extent, grain: dim.grain, ..label.dim };
                    }
                    Some((j, e)) if label.dim.extent != dim.extent => {
                        let (x, m, n) = (self.labels.name(x), label.dim.extent, dim.extent);
                        let text = format!(
                            "label `{x}` has extent {m} in argument {j} (dim {e}) but {n} in argument {i} (dim {d})"
                        );
                        return Err(Refusal::new("shape", text, &[unpack_place((j, e)), (i, d)]));
                    }
                    Some(_) => {}
                }
            }
        }
        Ok(())
    }

    fn axes(&mut self, args: &[&Layout]) -> Result<(), Refusal> {
        let mut check_boundaries = false;
        for (i, (dim_labels, layout)) in self.labels.inputs().iter().zip(args).enumerate() {
            for (d, (&x, dim)) in dim_labels.iter().zip(layout.dims()).enumerate() {
                if x == Labels::UNIT {
                    if let Some(axis) = dim.axes.iter().next() {
                        return Err(broadcast_refusal(layout, axis, (i, d)));
                    }
                    continue;
                }
                let label = &mut self.all[x as usize];
                let (old, new) = (label.dim, *dim);
                if !old.axes.is_prefix_of(new.axes) && !new.axes.is_prefix_of(old.axes) {
                    return Err(axis_order_refusal(
                        &self.labels.name(x),
                        args,
                        unpack_place(label.axes_from),
                        (i, d),
                    ));
                }
                check_boundaries |= !old.axes.is_empty() && !new.axes.is_empty() && old.grain != new.grain;
                label.dim.grain = match new.axes.len().cmp(&old.axes.len()) {
                    std::cmp::Ordering::Greater => new.grain,
                    std::cmp::Ordering::Less => old.grain,
                    // Both grains give the same boundaries: keep the coarser one, which carries more
                    // information.
                    std::cmp::Ordering::Equal if !new.axes.is_empty() => old.grain.max(new.grain),
                    std::cmp::Ordering::Equal => old.grain / gcd(old.grain, new.grain) * new.grain,
                };
                if new.axes.len() > old.axes.len() {
                    (label.dim.axes, label.axes_from) = (new.axes, pack_place(i, d));
                }
            }
        }
        if check_boundaries { self.check_same_boundaries(args) } else { Ok(()) }
    }

    /// Checks that every sharded dim has the shard boundaries that the grain of its label gives.
    fn check_same_boundaries(&self, args: &[&Layout]) -> Result<(), Refusal> {
        for (i, (dim_labels, layout)) in self.labels.inputs().iter().zip(args).enumerate() {
            for (d, (&x, dim)) in dim_labels.iter().zip(layout.dims()).enumerate() {
                if x == Labels::UNIT || dim.has_same_boundaries(self.dim(x).grain, layout.mesh()) {
                    continue;
                }
                let (x, (j, e), grain) =
                    (self.labels.name(x), unpack_place(self.all[x as usize].axes_from), self.dim(x).grain);
                let text = format!(
                    "label `{x}` is sharded in grains of {grain} in argument {j} (dim {e}) \
                     but of {} in argument {i} (dim {d}), which gives other shard boundaries",
                    dim.grain
                );
                let hint =
                    format!("declare one grain in the layouts of both tensors, as in {}:{grain}", dim.extent);
                return Err(Refusal::new("grain", text, &[(j, e), (i, d)]).hint(hint));
            }
        }
        Ok(())
    }

    fn assign_owners(&mut self, args: &[&Layout]) -> Result<(), Refusal> {
        for (x, label) in self.all.iter().enumerate() {
            for axis in label.dim.axes.iter() {
                let owner = &mut self.owners[axis.0 as usize];
                if *owner != NO_OWNER {
                    let (i, d) = unpack_place(self.all[*owner as usize].axes_from);
                    let (j, e) = unpack_place(label.axes_from);
                    let text = format!(
                        "axis `{}` shards label `{}` in argument {i} (dim {d}) and label `{}` in argument {j} (dim {e})",
                        args[i].mesh().name(axis),
                        self.labels.name(*owner),
                        self.labels.name(x as u8),
                    );
                    return Err(Refusal::new("conflict", text, &[(i, d), (j, e)]));
                }
                *owner = x as u8;
            }
        }
        Ok(())
    }

    fn check_unsharded(&self, signature: &Signature, args: &[&Layout]) -> Result<(), Refusal> {
        for terms in signature.inputs() {
            for x in self.labels.unsharded(terms) {
                let Label { dim, axes_from, .. } = self.all[x as usize];
                if let Some(axis) = dim.axes.iter().next() {
                    let (i, d) = unpack_place(axes_from);
                    let (x, axis) = (self.labels.name(x), args[i].mesh().name(axis));
                    let text = format!(
                        "label `{x}` must be unsharded, but axis `{axis}` shards it in argument {i} (dim {d})"
                    );
                    return Err(Refusal::new("whole", text, &[(i, d)]));
                }
            }
        }
        Ok(())
    }

    /// Takes extents and axes of created labels from the wanted outputs, and checks the extents of the other labels.
    fn take_created(&mut self, signature: &Signature, want: &[Option<&Layout>]) -> Result<(), Refusal> {
        for (k, dim_labels) in self.labels.outputs().iter().enumerate() {
            let Some(layout) = want.get(k).copied().flatten() else { continue };
            for (d, (&x, dim)) in dim_labels.iter().zip(layout.dims()).enumerate() {
                let name = || self.labels.name(x);
                let known = if x == Labels::UNIT {
                    Some(1)
                } else {
                    self.all[x as usize].extent_from.map(|_| self.dim(x).extent)
                };
                if known.is_some_and(|n| n != dim.extent) {
                    let (n, m, x) = (known.unwrap_or_default(), dim.extent, name());
                    let text =
                        format!("label `{x}` has extent {n}, but {m} in the wanted output {k} (dim {d})");
                    return Err(Refusal::new("shape", text, &[]));
                }
                if x == Labels::UNIT || self.all[x as usize].in_args {
                    continue;
                }
                if known.is_some() {
                    if self.dim(x).axes != dim.axes {
                        let text =
                            format!("two wanted outputs shard the created label `{}` differently", name());
                        return Err(Refusal::new("order", text, &[]));
                    }
                    continue;
                }
                for axis in dim.axes.iter() {
                    if self.owner(axis).is_some() || self.wanted.contains(axis) {
                        let axis = layout.mesh().name(axis);
                        let text =
                            format!("axis `{axis}` shards the created label `{}` and another label", name());
                        return Err(Refusal::new("conflict", text, &[]));
                    }
                    self.wanted = self.wanted.with(axis);
                }
                self.all[x as usize] = Label {
                    dim: *dim,
                    extent_from: Some(pack_place(k, d)),
                    axes_from: pack_place(k, d),
                    in_args: false,
                };
            }
        }
        self.check_created(signature)
    }

    fn check_created(&self, signature: &Signature) -> Result<(), Refusal> {
        if let Some(x) = self.all.iter().position(|l| l.extent_from.is_none()) {
            let x = self.labels.name(x as u8);
            let text = format!("no argument has label `{x}`, and no wanted layout gives its extent");
            return Err(Refusal::new("shape", text, &[]));
        }
        for x in signature.outputs().iter().flat_map(|t| self.labels.unsharded(t)) {
            if !self.dim(x).axes.is_empty() {
                let text = format!(
                    "label `{}` must be unsharded, but the wanted output shards it",
                    self.labels.name(x)
                );
                return Err(Refusal::new("whole", text, &[]));
            }
        }
        Ok(())
    }
}

fn check_same_mesh(args: &[&Layout], want: &[Option<&Layout>]) -> Result<(), Refusal> {
    let first = args[0].mesh();
    for (i, layout) in args.iter().enumerate() {
        if layout.mesh() != first {
            let text = format!("argument {i} is on {}, argument 0 on {first}", layout.mesh());
            return Err(Refusal::new("mesh", text, &[(i, 0)]));
        }
    }
    match want.iter().flatten().find(|w| w.mesh() != first) {
        Some(other) => Err(Refusal::new(
            "mesh",
            format!("the wanted output is on {}, argument 0 on {first}", other.mesh()),
            &[],
        )),
        None => Ok(()),
    }
}

fn broadcast_refusal(layout: &Layout, axis: Axis, (i, d): (usize, usize)) -> Refusal {
    let axis = layout.mesh().name(axis);
    let text = format!("axis `{axis}` shards dim {d} of argument {i}, which has extent 1 and is broadcast");
    Refusal::new("one", text, &[(i, d)])
}

fn axis_order_refusal(
    name: &str,
    args: &[&Layout],
    (j, e): (usize, usize),
    (i, d): (usize, usize),
) -> Refusal {
    let list = |i: usize, d: usize| {
        let layout = args[i];
        layout.dims()[d].axes.iter().map(|a| format!("@{}", layout.mesh().name(a))).collect::<String>()
    };
    let text = format!(
        "label `{name}` is sharded as {} in argument {j} (dim {e}) but as {} in argument {i} (dim {d}): neither is a prefix of the other",
        list(j, e),
        list(i, d)
    );
    Refusal::new("order", text, &[(j, e), (i, d)])
}
