//! A variable: a tensor on a tape.

use super::Tape;
use crate::id::Id;
use crate::leaf::largest_numel;
use crate::node::{Node, NodeKind, SavedTensors};
use crate::program::{OpRecord, RecordingCache, Slot};
use crate::regather::{GatheredActivation, SavedUngathered};
use shardgrad_dist::{Error, Kind, Result};
use shardgrad_tensor::execution::local_tensor::with_mapped;
use shardgrad_tensor::ops::redistribute::Redistribute;
use shardgrad_tensor::training_step::copies::record_loss;
use shardgrad_tensor::{Inference, Layout, Op, Point, Tensor, Value, op};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::fmt;
use std::panic::Location;
use std::rc::{Rc, Weak};

/// A tensor on a tape. A clone is another handle. A variable without an id is a constant: it has no gradient.
#[derive(Clone)]
pub struct Var(Rc<Inner>);

struct Inner {
    tensor: Tensor,
    tape: Tape,
    id: Option<Id>,
    /// The slot in a recorded program, and the number of that recording.
    slot: Option<(u32, Slot)>,
    /// Whether the variable is detached.
    detached: bool,
    /// How to gather the value again, if the backward pass does so.
    gathered: Option<Rc<GatheredActivation>>,
    /// Other layouts of the same value, made once by implied redistributions and shared by all uses while this handle
    /// lives.
    cached_layouts: RefCell<SmallVec<[CachedLayout; 1]>>,
}

/// Another layout of a value, and where it was made.
struct CachedLayout {
    var: Var,
    /// The number of the recording; 0 outside of recordings.
    recording: u32,
    /// Whether it was made under `no_grad`.
    no_grad: bool,
}

impl Var {
    pub(crate) fn new(tape: &Tape, tensor: Tensor, id: Option<Id>, slot: Option<Slot>) -> Var {
        let slot = slot.map(|slot| (tape.recording(), slot));
        Var(Rc::new(Inner {
            tensor,
            tape: tape.clone(),
            id,
            slot,
            detached: false,
            gathered: None,
            cached_layouts: RefCell::default(),
        }))
    }

    /// Sets how to gather a new value again.
    fn set_gathered(&mut self, gathered: &Rc<GatheredActivation>) {
        if let Some(inner) = Rc::get_mut(&mut self.0) {
            inner.gathered = Some(gathered.clone());
        }
    }

    /// The same variable, detached or not.
    fn with_detached(&self, detached: bool) -> Var {
        let (tensor, tape, cached_layouts) = (self.0.tensor.clone(), self.0.tape.clone(), RefCell::default());
        let (id, slot, gathered) = (self.0.id, self.0.slot, self.0.gathered.clone());
        Var(Rc::new(Inner { tensor, tape, id, slot, detached, gathered, cached_layouts }))
    }

    /// The same variable, which does not hold the other layouts that this one has.
    pub(super) fn without_cached_layouts(&self) -> Var {
        self.with_detached(self.0.detached)
    }

    /// The tape of this variable.
    #[must_use]
    pub fn tape(&self) -> &Tape {
        &self.0.tape
    }

    /// Whether this variable has a gradient.
    #[must_use]
    pub fn requires_grad(&self) -> bool {
        self.id().is_some()
    }

    /// The same value without a gradient.
    #[doc(alias = "stop_gradient")]
    #[must_use]
    pub fn detach(&self) -> Var {
        self.with_detached(true)
    }

    /// Whether this variable is detached.
    pub(crate) fn is_detached(&self) -> bool {
        self.0.detached
    }

    /// Wraps a plain tensor as a constant on the tape of this variable.
    #[must_use]
    pub fn constant(&self, tensor: Tensor) -> Var {
        self.0.tape.constant(tensor)
    }

    pub(crate) fn id(&self) -> Option<Id> {
        self.0.id.filter(|_| !self.0.detached)
    }

    /// The same value in another layout ([`Resharding::to_layout`](shardgrad_tensor::Resharding::to_layout)). `site` is the caller's line.
    ///
    /// # Panics
    /// Unwinds with the error if there is no route to the layout.
    #[must_use]
    pub fn to_layout_at(&self, to: &Layout, site: &'static Location<'static>) -> Var {
        if self.layout() == to { self.clone() } else { self.cached_layout(to, site) }
    }

    /// [`Var::to_layout_at`] for a value that no op keeps for the backward pass: what it was gathered from is kept, and gathered again
    /// there. As `to_layout_at` where the other layout takes no more memory.
    ///
    /// # Panics
    /// As [`Var::to_layout_at`].
    #[must_use]
    pub fn to_regathered_layout_at(&self, to: &Layout, site: &'static Location<'static>) -> Var {
        if self.layout() == to || largest_numel(to) <= largest_numel(self.layout()) {
            return self.to_layout_at(to, site);
        }
        let op = Redistribute::regathered(self.rank(), self.layout(), to);
        let op = op.unwrap_or_else(|e| e.at(site).raise());
        Var::apply_at(op, &[self], &[], site).into_iter().next().expect("redistribute has one output")
    }

    /// Backpropagates from this scalar: adds gradients to the leaves of the tape and consumes its graph.
    ///
    /// # Errors
    /// `Kind::Shape` if this is not a scalar, `Kind::Unsupported` if it has no gradient.
    #[track_caller]
    pub fn backward(&self) -> Result<()> {
        self.backward_scaled(1.0)
    }

    /// [`Var::backward`] from this scalar times a factor (the loss scale), which multiplies all gradients.
    ///
    /// # Errors
    /// As [`Var::backward`].
    #[doc(alias = "GradScaler")]
    #[doc(alias = "loss scaling")]
    #[track_caller]
    pub fn backward_scaled(&self, factor: f64) -> Result<()> {
        let (site, layout) = (Location::caller(), self.layout());
        if layout.ndim() != 0 {
            return Err(Error::new(
                Kind::Shape,
                format!("backward() needs a scalar, this tensor is {layout}"),
            )
            .detail("help", "reduce it first: x.mean().backward() or x.sum().backward()")
            .at(site));
        }
        let id = self.checked_id(site).ok_or_else(|| no_gradient_error(site))?;
        record_loss(&self.0.tensor);
        let seed = Tensor::full(self.rank(), &layout.dual(), factor)?;
        self.0.tape.backward_from([(id, seed)]);
        Ok(())
    }

    /// The number in a scalar. A collective call: all ranks call it together and get the same number.
    ///
    /// # Errors
    /// `Kind::Shape` if there is more than one element; `Kind::Unsupported` while a program is being recorded.
    #[track_caller]
    pub fn item(&self) -> Result<f64> {
        self.check_readable()?;
        self.0.tensor.item()
    }

    /// Layout, mesh, and the values at the edges of the dims as text: [`Tensor::show`]. A collective call: all ranks call it together and
    /// get the same text.
    ///
    /// # Errors
    /// `Kind::Unsupported` while a program is being recorded.
    #[track_caller]
    pub fn show(&self) -> Result<String> {
        self.check_readable()?;
        self.0.tensor.show()
    }

    /// Refuses to read a value while a program is being recorded.
    #[track_caller]
    fn check_readable(&self) -> Result<()> {
        if self.0.tape.is_recording() {
            return Err(Error::new(Kind::Unsupported, "a value is read while a program is being recorded")
                .detail("help", "return the tensor from the recorded function and read it afterwards")
                .at(Location::caller()));
        }
        Ok(())
    }

    /// The id, or `None` for a constant. Unwinds if the variable is stale.
    fn checked_id(&self, site: &'static Location<'static>) -> Option<Id> {
        let id = self.id()?;
        if self.0.tape.is_stale(id, &self.0.tensor) {
            let (text, help) = match id {
                Id::Output { .. } => (
                    "a variable from before the last backward pass is used again",
                    "its graph is gone: recompute it, or detach() it to use its value",
                ),
                Id::Leaf(_) => (
                    "a variable of a parameter that was replaced by another tensor is used again",
                    "take the parameter from the tape again, or detach() the variable to use its value",
                ),
            };
            Error::new(Kind::Unsupported, text).detail("help", help).at(site).raise();
        }
        Some(id)
    }

    /// Refuses a stale variable where an op would, whatever its layout: a change of layout that is none is no op.
    pub(crate) fn check_usable(&self, site: &'static Location<'static>) {
        if self.0.tape.records() || self.0.tape.is_recording() {
            let _ = self.checked_id(site);
        }
    }

    /// Whether a checkpointed block captured this value as a partial sum and needs it in a layout that takes no more
    /// memory. The block then saves that layout instead of the partial sum.
    fn is_reduced_before_block(&self, to: &Layout, recording: u32) -> bool {
        let tape = &self.0.tape;
        let is_made_in_it = self.0.slot.is_some_and(|(own, _)| own == recording);
        // A program recorded on meta tensors contains all its communication.
        recording != 0
            && !tape.is_meta()
            && !is_made_in_it
            && !self.layout().partial().is_empty()
            && largest_numel(to) <= largest_numel(self.layout())
            && !tape.recorder().is_argument(self.0.id, &self.0.tensor)
    }

    /// This value in another layout, made once.
    fn cached_layout(&self, to: &Layout, site: &'static Location<'static>) -> Var {
        let (recording, no_grad) = (self.0.tape.recording(), self.0.tape.is_no_grad());
        // A layout made under no_grad would stop a wanted gradient; one made in another recording is not part of this
        // one.
        let fits = |c: &&CachedLayout| {
            c.var.layout() == to && (!c.no_grad || no_grad) && (c.recording == 0 || c.recording == recording)
        };
        if let Some(cached) = self.0.cached_layouts.borrow().iter().find(fits) {
            return cached.var.clone();
        }
        let make = || match self.0.tape.derive_leaf((self.0.id, &self.0.tensor), to, site) {
            Some((id, tensor)) => {
                Var::new(&self.0.tape, tensor, Some(id), None).with_detached(self.0.detached)
            }
            None => {
                let op = Redistribute::between(self.rank(), self.layout(), to);
                let op = op.unwrap_or_else(|e| e.at(site).raise());
                Var::apply_at(op, &[self], &[], site).into_iter().next().expect("redistribute has one output")
            }
        };
        // Reduced before the block, once for all blocks, and not again in the backward pass.
        let (var, recording) = match self.is_reduced_before_block(to, recording) {
            true => (self.0.tape.outside_recording(make), 0),
            false => (make(), recording),
        };
        if recording != 0 {
            let cache: Weak<Inner> = Rc::downgrade(&self.0);
            self.0.tape.register_cache(cache);
        }
        self.0.cached_layouts.borrow_mut().push(CachedLayout { var: var.clone(), recording, no_grad });
        var
    }

    /// The slot of the variable in the program that a tape is recording. Unwinds for a variable of another tape and for a
    /// stale one, unless it is detached.
    pub(super) fn slot_on(&self, tape: &Tape, site: &'static Location<'static>) -> Slot {
        let own = |(recording, _): &(u32, Slot)| tape.same_as(self.tape()) && *recording == tape.recording();
        self.0.slot.filter(own).map(|(_, slot)| slot).unwrap_or_else(|| {
            let is_here = || {
                tape.same_as(self.tape()) && self.0.id.is_some_and(|id| !tape.is_stale(id, &self.0.tensor))
            };
            let id = self.id_on(tape, site).or_else(|| self.0.id.filter(|_| is_here()));
            tape.external_slot(id, &self.0.tensor)
        })
    }

    /// The id of the variable on a tape; `None` for a constant, of any tape. Unwinds for a variable of another tape and
    /// for a stale one.
    pub(super) fn id_on(&self, tape: &Tape, site: &'static Location<'static>) -> Option<Id> {
        let id = self.checked_id(site)?;
        if !tape.same_as(self.tape()) {
            Error::new(Kind::Unsupported, "one op has variables of different tapes")
                .detail("help", "use one tape per step, or detach() the older variable")
                .at(site)
                .raise();
        }
        Some(id)
    }
}

/// Runs an op on arguments that have the inferred layouts, and records it on a tape and in its active recorder.
/// Returns the visible outputs.
fn run(
    tape: &Tape,
    (op, inference): (&Rc<dyn Op>, &Rc<Inference>),
    args: &[&Var],
    site: &'static Location<'static>,
) -> SmallVec<[Var; 2]> {
    let context = (tape.rank(), tape.context());
    let outputs = match tape.is_meta() {
        true => op::meta(inference, tape.rank()),
        false => with_mapped(args, |v| v.tensor().local(), |x| op::run(&**op, x, inference, context, site))
            .unwrap_or_else(|e| e.raise()),
    };
    let visible = outputs.len() - op.num_saved();
    let record = tape.is_recording().then(|| {
        let inputs = args.iter().map(|v| v.slot_on(tape, site)).collect();
        let outputs = outputs[..visible].iter().map(|t| t.layout().clone()).collect();
        let stops_gradient = args.iter().map(|v| v.0.detached || tape.is_no_grad()).collect();
        tape.record_op(OpRecord {
            op: op.clone(),
            inputs,
            outputs,
            path: tape.context().path(),
            site,
            stops_gradient,
        })
    });
    let id = tape.records().then(|| make_node(tape, (op, inference), args, &outputs, site)).flatten();
    let mut made = SmallVec::new();
    for (out, tensor) in (0..visible as u32).zip(outputs) {
        let id = id.filter(|_| tensor.dtype().is_float());
        let id = id.map(|(round, node)| Id::Output { round, node, out });
        made.push(Var::new(tape, tensor, id, record.map(|record| Slot::Output { record, out })));
    }
    if id.is_some() && op.is_regathered() && tape.regathers() {
        made.iter_mut().for_each(|var: &mut Var| {
            let place = (tape.context().path(), site);
            let gathered = GatheredActivation::new(args[0].tensor(), var.layout(), place);
            var.set_gathered(&gathered);
        });
    }
    made
}

/// Adds the node of an op that ran; `None` if no input has a gradient.
fn make_node(
    tape: &Tape,
    (op, inference): (&Rc<dyn Op>, &Rc<Inference>),
    args: &[&Var],
    outputs: &[Tensor],
    site: &'static Location<'static>,
) -> Option<(u32, u32)> {
    let (mut inputs, mut wanted) = (SmallVec::<[Option<Id>; 4]>::new(), SmallVec::<[bool; 4]>::new());
    let differentiable = op.differentiable();
    for (i, arg) in args.iter().enumerate() {
        let has_gradient = differentiable.get(i).copied().unwrap_or(true) && arg.dtype().is_float();
        let id = if has_gradient { arg.id_on(tape, site) } else { None };
        inputs.push(id);
        wanted.push(id.is_some());
    }
    if !wanted.contains(&true) {
        return None;
    }
    let keeps = op.saved_for_backward_of(&wanted);
    let mut saved = SavedTensors::default();
    for (i, arg) in args.iter().enumerate() {
        saved.inputs.push(None);
        if !keeps.inputs.contains(&i) {
            continue;
        }
        if let Some(gathered) = &arg.0.gathered {
            saved.indirect_mut().ungathered.push((i, SavedUngathered::new(gathered)));
            continue;
        }
        match tape.saved_by_number(arg.0.id.filter(|_| tape.same_as(arg.tape())), &arg.0.tensor) {
            Some(leaf) => saved.indirect_mut().leaves.push((i as u32, leaf)),
            None => saved.inputs[i] = Some(arg.0.tensor.clone()),
        }
    }
    for (i, output) in outputs.iter().enumerate() {
        saved.outputs.push(keeps.outputs.contains(&i).then(|| output.clone()));
    }
    Some(tape.push_node(Node::new(
        NodeKind::Op(op.clone(), inference.clone()),
        inputs,
        saved,
        outputs.len() - op.num_saved(),
        (tape.context().path(), site),
    )))
}

/// The tape that an op goes on, whatever the order of its arguments: of several tapes, the first whose argument has a
/// gradient, else the first that records.
fn common_tape<'a>(args: &[&'a Var]) -> &'a Tape {
    let first = args[0].tape();
    if args.iter().all(|v| v.tape().same_as(first)) {
        return first;
    }
    let records = |v: &&&Var| v.tape().records() || v.tape().is_recording();
    // A value made in a recording has no id, and may have a gradient all the same.
    let has_gradient = |v: &&&Var| v.requires_grad() || v.0.slot.is_some() && v.tape().is_recording();
    let found =
        args.iter().find(|v| has_gradient(v) && records(v)).or_else(|| args.iter().find(has_gradient));
    found.or_else(|| args.iter().find(records)).map_or(first, |v| v.tape())
}

/// The error of a backward pass from a value without a gradient.
pub(crate) fn no_gradient_error(site: &'static Location<'static>) -> Error {
    let help = "no trained parameter took part in it, or it was made under no_grad() or on an inference tape";
    Error::new(Kind::Unsupported, "backward() of a value that has no gradient").detail("help", help).at(site)
}

impl RecordingCache for Inner {
    fn forget(&self, recording: u32) {
        self.cached_layouts.borrow_mut().retain(|cached| cached.recording != recording);
    }
}

impl Value for Var {
    fn tensor(&self) -> &Tensor {
        &self.0.tensor
    }

    fn apply_at(
        op: Rc<dyn Op>,
        args: &[&Var],
        points: &[&dyn Point<Var>],
        site: &'static Location<'static>,
    ) -> SmallVec<[Var; 2]> {
        let tape = &args.first().expect("an op has at least one argument").0.tape;
        let context = (tape.rank(), tape.context());
        let mut are_identities = SmallVec::<[bool; 4]>::new();
        points.iter().for_each(|point| are_identities.push(point.is_identity(args[0])));
        let decompose = |layouts: &[&Layout]| op::decomposition(&*op, context.1, layouts, &are_identities);
        if let Some(parts) = with_mapped(args, |v| v.layout(), decompose) {
            return parts
                .run(args, points, site, |op, args, points| Var::apply_at(op.clone(), args, points, site));
        }
        let inference =
            with_mapped(args, |v| v.layout(), |layouts| op::plan(&*op, context, layouts, &[], site))
                .unwrap_or_else(|e| e.raise());
        if !inference.changes_inputs() {
            return run(common_tape(args), (&op, &inference), args, site);
        }
        let in_target_layout =
            |(v, target): (&&Var, &Option<Layout>)| target.as_ref().map(|to| v.cached_layout(to, site));
        let cached_layouts: SmallVec<[Option<Var>; 4]> =
            args.iter().zip(&inference.targets).map(in_target_layout).collect();
        let args: SmallVec<[&Var; 4]> =
            args.iter().zip(&cached_layouts).map(|(v, cached)| cached.as_ref().unwrap_or(v)).collect();
        run(common_tape(&args), (&op, &inference), &args, site)
    }
}

impl fmt::Debug for Var {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Var({}, {:?})", self.0.tensor.layout(), self.0.id)
    }
}
