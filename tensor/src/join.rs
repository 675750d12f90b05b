//! What the arguments of an op say together about each label: its extent, the axes that split it, its grain.

use crate::dim::Dim;
use crate::layout::{Layout, gcd};
use crate::refusal::Refusal;
use crate::signature::{Labels, Signature};
use shardgrad_dist::{Axis, AxisSet, Mesh};
use smallvec::SmallVec;
use std::sync::Arc;

/// Stands for an axis that splits no label.
const NOBODY: u8 = u8::MAX;

/// An argument and one of its dims.
type Place = (u16, u16);

fn place(i: usize, d: usize) -> Place {
    (i as u16, d as u16)
}

fn wide((i, d): Place) -> (usize, usize) {
    (usize::from(i), usize::from(d))
}

/// One label, as joined so far.
#[derive(Clone, Copy)]
struct Label {
    /// The extent, the longest list of axes and the grain.
    dim: Dim,
    /// The argument and dim that gave the extent; `None` while the extent is unknown.
    at: Option<Place>,
    /// The argument and dim that gave the list of axes.
    split_at: Place,
    /// Whether an argument has it; otherwise it is created, and `at` counts outputs.
    given: bool,
}

/// The joined labels of an op on some arguments.
pub(crate) struct Join {
    pub(crate) labels: Arc<Labels>,
    /// Per axis of the mesh the label that it splits in the arguments.
    owners: [u8; Mesh::MAX_AXES],
    /// Axes that split a created label in the wanted outputs.
    pub(crate) wanted: AxisSet,
    all: SmallVec<[Label; 8]>,
}

impl Join {
    /// Joins the labels of all arguments and of the wanted outputs.
    ///
    /// # Errors
    /// Codes `shape` for another number of arguments; `mesh`, `shape`, `one`, `order`, `grain`, `conflict`, `whole`, in this order.
    pub(crate) fn new(
        signature: &Signature,
        args: &[&Layout],
        want: &[Option<&Layout>],
    ) -> Result<Join, Refusal> {
        if args.len() != signature.num_inputs() {
            let text = format!("{} argument(s) for a signature of {}", args.len(), signature.num_inputs());
            return Err(Refusal::new("shape", text, &[])
                .hint("give as many as stand before `->`, or write all of them into Op::signature"));
        }
        one_mesh(args, want)?;
        let wanted_ndim = |k: usize| want.get(k).copied().flatten().map(Layout::ndim);
        let labels = signature.bind(|i| args[i].ndim(), wanted_ndim)?;
        let unknown = Label { dim: Dim::whole(0), at: None, split_at: (0, 0), given: false };
        let mut join = Join {
            owners: [NOBODY; Mesh::MAX_AXES],
            wanted: AxisSet::EMPTY,
            all: SmallVec::from_elem(unknown, labels.count()),
            labels,
        };
        join.extents(args)?;
        join.axes(args)?;
        join.owners(args)?;
        join.whole(signature, args)?;
        if !want.is_empty() || join.all.iter().any(|l| !l.given) {
            join.created(signature, want)?;
        }
        Ok(join)
    }

    /// The label that an axis splits in the arguments.
    pub(crate) fn owner(&self, axis: Axis) -> Option<u8> {
        Some(self.owners[axis.0 as usize]).filter(|label| *label != NOBODY)
    }

    /// Everything known about a label.
    pub(crate) fn dim(&self, label: u8) -> Dim {
        if label == Labels::ONE { Dim::whole(1) } else { self.all[label as usize].dim }
    }

    /// The lists of axes of the labels that arguments have, labels in order.
    pub(crate) fn split_axes(&self) -> impl Iterator<Item = (u8, Axis)> {
        let given = self.all.iter().enumerate().filter(|(_, label)| label.given);
        given.flat_map(|(x, label)| label.dim.axes.iter().map(move |a| (x as u8, a)))
    }

    /// All labels, for those who run the op.
    pub(crate) fn into_labels(self) -> (Arc<Labels>, SmallVec<[Dim; 8]>) {
        (self.labels, self.all.iter().map(|l| l.dim).collect())
    }

    fn extents(&mut self, args: &[&Layout]) -> Result<(), Refusal> {
        for (i, (places, layout)) in self.labels.inputs().iter().zip(args).enumerate() {
            for (d, (&x, dim)) in places.iter().zip(layout.dims()).enumerate() {
                if x == Labels::ONE {
                    if dim.extent != 1 {
                        let n = dim.extent;
                        let text = format!(
                            "dim {d} of argument {i} has extent {n}, but the signature wants 1 there"
                        );
                        return Err(Refusal::new("shape", text, &[(i, d)]));
                    }
                    continue;
                }
                let label = &mut self.all[x as usize];
                match label.at {
                    None => {
                        (label.at, label.given) = (Some(place(i, d)), true);
                        label.dim = Dim { extent: dim.extent, grain: dim.grain, ..label.dim };
                    }
                    Some((j, e)) if label.dim.extent != dim.extent => {
                        let (x, m, n) = (self.labels.name(x), label.dim.extent, dim.extent);
                        let text = format!(
                            "label `{x}` has extent {m} in argument {j} (dim {e}) but {n} in argument {i} (dim {d})"
                        );
                        return Err(Refusal::new("shape", text, &[wide((j, e)), (i, d)]));
                    }
                    Some(_) => {}
                }
            }
        }
        Ok(())
    }

    fn axes(&mut self, args: &[&Layout]) -> Result<(), Refusal> {
        let mut check_cuts = false;
        for (i, (places, layout)) in self.labels.inputs().iter().zip(args).enumerate() {
            for (d, (&x, dim)) in places.iter().zip(layout.dims()).enumerate() {
                if x == Labels::ONE {
                    if let Some(axis) = dim.axes.iter().next() {
                        return Err(one(layout, axis, (i, d)));
                    }
                    continue;
                }
                let label = &mut self.all[x as usize];
                let (old, new) = (label.dim, *dim);
                if !old.axes.is_prefix_of(new.axes) && !new.axes.is_prefix_of(old.axes) {
                    return Err(order(&self.labels.name(x), args, wide(label.split_at), (i, d)));
                }
                check_cuts |= !old.axes.is_empty() && !new.axes.is_empty() && old.grain != new.grain;
                label.dim.grain = match new.axes.len().cmp(&old.axes.len()) {
                    std::cmp::Ordering::Greater => new.grain,
                    std::cmp::Ordering::Less => old.grain,
                    // Of two grains that cut alike the coarser one says more.
                    std::cmp::Ordering::Equal if !new.axes.is_empty() => old.grain.max(new.grain),
                    std::cmp::Ordering::Equal => old.grain / gcd(old.grain, new.grain) * new.grain,
                };
                if new.axes.len() > old.axes.len() {
                    (label.dim.axes, label.split_at) = (new.axes, place(i, d));
                }
            }
        }
        if check_cuts { self.same_cuts(args) } else { Ok(()) }
    }

    /// Checks that every split dim is cut where the grain of its label cuts.
    fn same_cuts(&self, args: &[&Layout]) -> Result<(), Refusal> {
        for (i, (places, layout)) in self.labels.inputs().iter().zip(args).enumerate() {
            for (d, (&x, dim)) in places.iter().zip(layout.dims()).enumerate() {
                if x == Labels::ONE || dim.same_cuts(self.dim(x).grain, layout.mesh()) {
                    continue;
                }
                let (x, (j, e), grain) =
                    (self.labels.name(x), wide(self.all[x as usize].split_at), self.dim(x).grain);
                let text = format!(
                    "label `{x}` is split in grains of {grain} in argument {j} (dim {e}) \
                     but of {} in argument {i} (dim {d}), which cuts it elsewhere",
                    dim.grain
                );
                let hint = format!(
                    "declare one grain for both where the tensors are made, as in {}:{grain}",
                    dim.extent
                );
                return Err(Refusal::new("grain", text, &[(j, e), (i, d)]).hint(hint));
            }
        }
        Ok(())
    }

    fn owners(&mut self, args: &[&Layout]) -> Result<(), Refusal> {
        for (x, label) in self.all.iter().enumerate() {
            for axis in label.dim.axes.iter() {
                let owner = &mut self.owners[axis.0 as usize];
                if *owner != NOBODY {
                    let (i, d) = wide(self.all[*owner as usize].split_at);
                    let (j, e) = wide(label.split_at);
                    let text = format!(
                        "axis `{}` splits label `{}` in argument {i} (dim {d}) and label `{}` in argument {j} (dim {e})",
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

    fn whole(&self, signature: &Signature, args: &[&Layout]) -> Result<(), Refusal> {
        for terms in signature.inputs() {
            for x in self.labels.whole(terms) {
                let Label { dim, split_at, .. } = self.all[x as usize];
                if let Some(axis) = dim.axes.iter().next() {
                    let (i, d) = wide(split_at);
                    let (x, axis) = (self.labels.name(x), args[i].mesh().name(axis));
                    let text = format!(
                        "label `{x}` must be whole, but axis `{axis}` splits it in argument {i} (dim {d})"
                    );
                    return Err(Refusal::new("whole", text, &[(i, d)]));
                }
            }
        }
        Ok(())
    }

    /// Takes extents and axes of created labels from the wanted outputs, and checks the extents of the others.
    fn created(&mut self, signature: &Signature, want: &[Option<&Layout>]) -> Result<(), Refusal> {
        for (k, places) in self.labels.outputs().iter().enumerate() {
            let Some(layout) = want.get(k).copied().flatten() else { continue };
            for (d, (&x, dim)) in places.iter().zip(layout.dims()).enumerate() {
                let name = || self.labels.name(x);
                let known = if x == Labels::ONE {
                    Some(1)
                } else {
                    self.all[x as usize].at.map(|_| self.dim(x).extent)
                };
                if known.is_some_and(|n| n != dim.extent) {
                    let (n, m, x) = (known.unwrap_or_default(), dim.extent, name());
                    let text =
                        format!("label `{x}` has extent {n}, but {m} in the wanted output {k} (dim {d})");
                    return Err(Refusal::new("shape", text, &[]));
                }
                if x == Labels::ONE || self.all[x as usize].given {
                    continue;
                }
                if known.is_some() {
                    if self.dim(x).axes != dim.axes {
                        let text =
                            format!("two wanted outputs split the created label `{}` differently", name());
                        return Err(Refusal::new("order", text, &[]));
                    }
                    continue;
                }
                for axis in dim.axes.iter() {
                    if self.owner(axis).is_some() || self.wanted.contains(axis) {
                        let axis = layout.mesh().name(axis);
                        let text =
                            format!("axis `{axis}` splits the created label `{}` and another one", name());
                        return Err(Refusal::new("conflict", text, &[]));
                    }
                    self.wanted = self.wanted.with(axis);
                }
                self.all[x as usize] =
                    Label { dim: *dim, at: Some(place(k, d)), split_at: place(k, d), given: false };
            }
        }
        self.created_are_known(signature)
    }

    fn created_are_known(&self, signature: &Signature) -> Result<(), Refusal> {
        if let Some(x) = self.all.iter().position(|l| l.at.is_none()) {
            let x = self.labels.name(x as u8);
            let text = format!("no argument has label `{x}`, and no wanted layout says its extent");
            return Err(Refusal::new("shape", text, &[]));
        }
        for x in signature.outputs().iter().flat_map(|t| self.labels.whole(t)) {
            if !self.dim(x).axes.is_empty() {
                let text =
                    format!("label `{}` must be whole, but the wanted output splits it", self.labels.name(x));
                return Err(Refusal::new("whole", text, &[]));
            }
        }
        Ok(())
    }
}

fn one_mesh(args: &[&Layout], want: &[Option<&Layout>]) -> Result<(), Refusal> {
    let first = args[0].mesh();
    for (i, layout) in args.iter().enumerate() {
        if layout.mesh() != first {
            let text = format!("argument {i} lies on {}, argument 0 on {first}", layout.mesh());
            return Err(Refusal::new("mesh", text, &[(i, 0)]));
        }
    }
    match want.iter().flatten().find(|w| w.mesh() != first) {
        Some(other) => Err(Refusal::new(
            "mesh",
            format!("an output is wanted on {}, argument 0 lies on {first}", other.mesh()),
            &[],
        )),
        None => Ok(()),
    }
}

fn one(layout: &Layout, axis: Axis, (i, d): (usize, usize)) -> Refusal {
    let axis = layout.mesh().name(axis);
    let text = format!("axis `{axis}` splits dim {d} of argument {i}, which has extent 1 and is broadcast");
    Refusal::new("one", text, &[(i, d)])
}

fn order(name: &str, args: &[&Layout], (j, e): (usize, usize), (i, d): (usize, usize)) -> Refusal {
    let list = |i: usize, d: usize| {
        let layout = args[i];
        layout.dims()[d].axes.iter().map(|a| format!("@{}", layout.mesh().name(a))).collect::<String>()
    };
    let text = format!(
        "label `{name}` is split as {} in argument {j} (dim {e}) but as {} in argument {i} (dim {d}): neither continues the other",
        list(j, e),
        list(i, d)
    );
    Refusal::new("order", text, &[(j, e), (i, d)])
}
