//! A variable: a tensor whose making is on a tape.

use crate::id::{Id, Key};
use crate::program::{Keeper, OpRecord, Slot, SumDType};
use crate::tape::{Node, Tape, Work};
use shardgrad_dist::{Error, Kind, Result};
use shardgrad_tensor::ops::redistribute::Redistribute;
use shardgrad_tensor::piece::listed;
use shardgrad_tensor::{Inference, Layout, Op, Tensor, Value, op};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::fmt;
use std::panic::Location;
use std::rc::{Rc, Weak};

/// A tensor on a tape. Cloning copies the handle. Without an id it is a constant: no gradient reaches it.
#[derive(Clone)]
pub struct Var(Rc<Inner>);

struct Inner {
    tensor: Tensor,
    tape: Tape,
    id: Option<Id>,
    /// What it is in the program of a recording, and the number of that recording.
    slot: Option<(u32, Slot)>,
    /// Whether it was cut off: a gradient could reach it, and shall not.
    cut: bool,
    /// Other layouts of the same value, made once by implied steps and shared by all uses while this handle lives.
    forms: RefCell<SmallVec<[Form; 1]>>,
}

/// Another layout of a value, and where it was made.
struct Form {
    var: Var,
    /// The number of the recording; 0 outside of any.
    recording: u32,
    /// Whether it was made to have no gradient.
    quiet: bool,
}

impl Var {
    pub(crate) fn new(tape: &Tape, tensor: Tensor, id: Option<Id>, slot: Option<Slot>) -> Var {
        let slot = slot.map(|slot| (tape.recording(), slot));
        Var(Rc::new(Inner { tensor, tape: tape.clone(), id, slot, cut: false, forms: RefCell::default() }))
    }

    /// The same variable, cut off or not.
    fn cut_if(&self, cut: bool) -> Var {
        let (tensor, tape, forms) = (self.0.tensor.clone(), self.0.tape.clone(), RefCell::default());
        Var(Rc::new(Inner { tensor, tape, id: self.0.id, slot: self.0.slot, cut, forms }))
    }

    /// The tape this variable is on.
    #[must_use]
    pub fn tape(&self) -> &Tape {
        &self.0.tape
    }

    /// Whether a gradient reaches this variable.
    #[must_use]
    pub fn requires_grad(&self) -> bool {
        self.id().is_some()
    }

    /// The same value, cut off: no gradient flows through it.
    #[must_use]
    pub fn detach(&self) -> Var {
        self.cut_if(true)
    }

    /// Whether it was cut off.
    pub(crate) fn is_cut(&self) -> bool {
        self.0.cut
    }

    /// A plain tensor as a constant on the tape of this variable.
    #[must_use]
    pub fn constant(&self, tensor: Tensor) -> Var {
        self.0.tape.constant(tensor)
    }

    pub(crate) fn id(&self) -> Option<Id> {
        self.0.id.filter(|_| !self.0.cut)
    }

    /// The same value in another layout; the collective that leads there has its adjoint on the tape. A layout of a narrower float
    /// rounds the value before it moves; its gradient is moved and added up in the wider one.
    ///
    /// # Panics
    /// Unwinds with the error if no route leads there.
    #[track_caller]
    #[must_use]
    pub fn to_layout(&self, to: &Layout) -> Var {
        self.in_layout(to, Location::caller())
    }

    /// The same value in another layout, asked for by a line.
    pub(crate) fn in_layout(&self, to: &Layout, site: &'static Location<'static>) -> Var {
        if self.layout() == to { self.clone() } else { self.form(to, site) }
    }

    /// Backpropagates from this scalar: gradients are added to the leaves of the tape, whose graph is used up.
    ///
    /// # Errors
    /// `Kind::Shape` if this is no scalar, `Kind::Unsupported` if no gradient reaches it.
    #[track_caller]
    pub fn backward(&self) -> Result<()> {
        self.backward_scaled(1.0)
    }

    /// [`Var::backward`] from this scalar times a factor (a loss scale), which all gradients then bear.
    ///
    /// # Errors
    /// As [`Var::backward`].
    #[track_caller]
    pub fn backward_scaled(&self, factor: f64) -> Result<()> {
        let (site, layout) = (Location::caller(), self.layout());
        if layout.ndim() != 0 {
            return Err(Error::new(Kind::Shape, format!("backward of a tensor that is no scalar: {layout}"))
                .detail("help", "reduce it first: x.mean().backward() or x.sum().backward()")
                .at(site));
        }
        let id = self.live(site).ok_or_else(|| unreached(site))?;
        let seed = Tensor::full(self.rank(), &layout.dual(), factor)?;
        self.0.tape.backward_from([(id, seed)]);
        Ok(())
    }

    /// The number in a scalar, on every rank alike: every rank calls this together.
    ///
    /// # Errors
    /// `Kind::Shape` if there is more than one element; `Kind::Unsupported` while a program is recorded.
    #[track_caller]
    pub fn item(&self) -> Result<f64> {
        if self.0.tape.is_recording() {
            return Err(Error::new(Kind::Unsupported, "a value is read while the program is recorded")
                .detail("help", "return the tensor from the recorded function and read it afterwards")
                .at(Location::caller()));
        }
        self.0.tensor.item()
    }

    /// The id, unless this is a constant. A variable that its tape has left behind is an error.
    fn live(&self, site: &'static Location<'static>) -> Option<Id> {
        let id = self.id()?;
        if self.0.tape.is_gone(id, &self.0.tensor) {
            let (text, help) = match id {
                Id::Made { .. } => (
                    "a variable from before the last backward pass is used again",
                    "its graph is gone: recompute it, or detach() it to use its value",
                ),
                Id::Leaf(_) => (
                    "a variable of a parameter that is another tensor now is used again",
                    "take the parameter from the tape again, or detach() the variable to use its value",
                ),
            };
            Error::new(Kind::Unsupported, text).detail("help", help).at(site).raise();
        }
        Some(id)
    }

    /// Whether a block that is computed again has captured this value, in which a sum is pending, and needs it in a layout that takes
    /// no more memory: what the block keeps instead.
    fn is_captured_for(&self, to: &Layout, recording: u32) -> bool {
        let tape = &self.0.tape;
        // Of the last ranks, which have the largest shards: ranks have to decide alike.
        let mesh = self.rank().mesh();
        let last: Vec<usize> = mesh.axes().map(|axis| mesh.size(axis) - 1).collect();
        let numel = |layout: &Layout| layout.local_shape(&last).iter().product::<usize>();
        let is_made_in_it = self.0.slot.is_some_and(|(own, _)| own == recording);
        // A program that is recorded in outline has all in it that moves.
        recording != 0
            && !tape.is_outline()
            && !is_made_in_it
            && !self.layout().partial().is_empty()
            && numel(to) <= numel(self.layout())
            && !tape.recorder().is_argument(self.0.id, &self.0.tensor)
    }

    /// Another layout of this value, made once.
    fn form(&self, to: &Layout, site: &'static Location<'static>) -> Var {
        let (recording, quiet) = (self.0.tape.recording(), self.0.tape.is_quiet());
        // One made under no_grad would stop a gradient that is wanted; one made in another recording is not in this one.
        let serves = |f: &&Form| {
            f.var.layout() == to && (!f.quiet || quiet) && (f.recording == 0 || f.recording == recording)
        };
        if let Some(form) = self.0.forms.borrow().iter().find(serves) {
            return form.var.clone();
        }
        let make = || match self.0.tape.leaf_form((self.0.id, &self.0.tensor), to, site) {
            Some((id, tensor)) => Var::new(&self.0.tape, tensor, Some(id), None).cut_if(self.0.cut),
            None => {
                let op = Redistribute::between(self.rank(), self.layout(), to);
                let op = op.unwrap_or_else(|e| e.at(site).raise());
                Var::apply_at(op, &[self], site).into_iter().next().expect("redistribute has one output")
            }
        };
        // Completed before the block, once for all blocks, and not again in the backward pass.
        let (form, recording) = match self.is_captured_for(to, recording) {
            true => (self.0.tape.outside(make), 0),
            false => (make(), recording),
        };
        if recording != 0 {
            let keeper: Weak<Inner> = Rc::downgrade(&self.0);
            self.0.tape.note_keeper(keeper);
        }
        self.0.forms.borrow_mut().push(Form { var: form.clone(), recording, quiet });
        form
    }

    pub(crate) fn apply_at(
        op: Rc<dyn Op>,
        args: &[&Var],
        site: &'static Location<'static>,
    ) -> SmallVec<[Var; 2]> {
        let tape = &args.first().expect("an op has at least one argument").0.tape;
        let place = (tape.rank(), tape.context());
        let planned = listed(args, |v| v.layout(), |layouts| op::plan(&*op, place, layouts, &[], site));
        let inference = planned.unwrap_or_else(|e| e.raise());
        if inference.targets.iter().all(Option::is_none) {
            return tape_of(args).run((&op, &inference), args, site);
        }
        let form = |(v, target): (&&Var, &Option<Layout>)| target.as_ref().map(|to| v.form(to, site));
        let forms: SmallVec<[Option<Var>; 4]> = args.iter().zip(&inference.targets).map(form).collect();
        let args: SmallVec<[&Var; 4]> =
            args.iter().zip(&forms).map(|(v, form)| form.as_ref().unwrap_or(v)).collect();
        tape_of(&args).run((&op, &inference), &args, site)
    }
}

impl Tape {
    /// A tensor that no gradient reaches.
    #[must_use]
    pub fn constant(&self, tensor: Tensor) -> Var {
        Var::new(self, tensor, None, None)
    }

    /// The leaf of a parameter; made at its first use, the same one as long as the parameter is the same tensor. A constant on a
    /// tape that does not record, and under [`Tape::no_grad`].
    ///
    /// # Panics
    /// Unwinds with `Kind::Unsupported` if it is another tensor than the one that the running round has used, or lies otherwise
    /// than the gradient that is added up for it.
    #[track_caller]
    #[must_use]
    pub fn leaf(&self, key: Key, tensor: &Tensor) -> Var {
        self.leaf_summed(key, tensor, SumDType::of(tensor.dtype()))
    }

    /// The leaf of a parameter whose cotangents are added up in dtypes no narrower than its own.
    #[track_caller]
    pub(crate) fn leaf_summed(&self, key: Key, tensor: &Tensor, sums: SumDType) -> Var {
        let (id, tensor) = self.leaf_at(key, tensor, sums, Location::caller());
        let leaf = Var::new(self, tensor, id, None);
        if self.is_quiet() { leaf.detach() } else { leaf }
    }

    /// The slot of a variable in the program that is recorded. One of another tape, or of a graph that is gone, is an error
    /// unless it was cut off.
    pub(crate) fn slot_of(&self, var: &Var, site: &'static Location<'static>) -> Slot {
        let own = |(recording, _): &(u32, Slot)| self.same_as(var.tape()) && *recording == self.recording();
        var.0.slot.filter(own).map(|(_, slot)| slot).unwrap_or_else(|| {
            let is_here =
                || self.same_as(var.tape()) && var.0.id.is_some_and(|id| !self.is_gone(id, &var.0.tensor));
            let id = self.live_here(var, site).or_else(|| var.0.id.filter(|_| is_here()));
            self.outer_slot(id, &var.0.tensor)
        })
    }

    /// Runs an op on arguments that lie as was inferred, and puts it on the tape (and into the recorder, if there is one);
    /// gives its visible outputs.
    fn run(
        &self,
        (op, inference): (&Rc<dyn Op>, &Rc<Inference>),
        args: &[&Var],
        site: &'static Location<'static>,
    ) -> SmallVec<[Var; 2]> {
        let place = (self.rank(), self.context());
        let outputs = match self.is_outline() {
            true => op::outline(inference, self.rank()),
            false => listed(args, |v| v.tensor().piece(), |x| op::run(&**op, x, inference, place, site))
                .unwrap_or_else(|e| e.raise()),
        };
        let visible = outputs.len() - op.num_saved();
        let record = self.is_recording().then(|| {
            let inputs = args.iter().map(|v| self.slot_of(v, site)).collect();
            let outputs = outputs[..visible].iter().map(|t| t.layout().clone()).collect();
            let stops = args.iter().map(|v| v.0.cut || self.is_quiet()).collect();
            self.note(OpRecord { op: op.clone(), inputs, outputs, path: self.context().path(), site, stops })
        });
        let id = self.records().then(|| self.node((op, inference), args, &outputs, site)).flatten();
        let mut made = SmallVec::new();
        for (out, tensor) in (0..visible as u32).zip(outputs) {
            let id = id.filter(|_| tensor.dtype().is_float());
            let id = id.map(|(round, node)| Id::Made { round, node, out });
            made.push(Var::new(self, tensor, id, record.map(|record| Slot::Made { record, out })));
        }
        made
    }

    /// The node of an op that was run; none where no gradient can flow.
    fn node(
        &self,
        (op, inference): (&Rc<dyn Op>, &Rc<Inference>),
        args: &[&Var],
        outputs: &[Tensor],
        site: &'static Location<'static>,
    ) -> Option<(u32, u32)> {
        let mut inputs: SmallVec<[Option<Id>; 4]> = SmallVec::new();
        for (i, arg) in args.iter().enumerate() {
            let differentiable =
                op.differentiable().get(i).copied().unwrap_or(true) && arg.dtype().is_float();
            inputs.push(if differentiable { self.live_here(arg, site) } else { None });
        }
        if inputs.iter().all(Option::is_none) {
            return None;
        }
        let wanted: SmallVec<[bool; 4]> = inputs.iter().map(Option::is_some).collect();
        let keeps = op.keeps_for(&wanted);
        let mut kept_inputs = SmallVec::new();
        for (i, arg) in args.iter().enumerate() {
            kept_inputs.push(keeps.inputs.contains(&i).then(|| arg.0.tensor.clone()));
        }
        let mut kept_outputs = SmallVec::new();
        for (i, output) in outputs.iter().enumerate() {
            kept_outputs.push(keeps.outputs.contains(&i).then(|| output.clone()));
        }
        Some(self.push(Node {
            work: Work::Op(op.clone(), inference.clone()),
            inputs,
            kept_inputs,
            kept_outputs,
            cotangents: SmallVec::from_elem(None, outputs.len() - op.num_saved()),
            path: self.context().path(),
            site,
        }))
    }

    /// The id of a variable on this tape, unless it is a constant, of whatever tape. One of another tape, or of a graph that is
    /// gone, is an error.
    pub(crate) fn live_here(&self, var: &Var, site: &'static Location<'static>) -> Option<Id> {
        let id = var.live(site)?;
        if !self.same_as(var.tape()) {
            Error::new(Kind::Unsupported, "two variables of different tapes meet")
                .detail("help", "use one tape a step, or detach() the older variable")
                .at(site)
                .raise();
        }
        Some(id)
    }
}

/// The tape that an op goes on, whatever the order of its arguments: where several meet, that of the first through which a
/// gradient can flow, else of the first on a tape that keeps what happens.
fn tape_of<'a>(args: &[&'a Var]) -> &'a Tape {
    let first = args[0].tape();
    if args.iter().all(|v| v.tape().same_as(first)) {
        return first;
    }
    let notes = |v: &&&Var| v.tape().records() || v.tape().is_recording();
    // What a recording has made has no id, and may have a gradient all the same.
    let reached = |v: &&&Var| v.requires_grad() || v.0.slot.is_some() && v.tape().is_recording();
    let found = args.iter().find(|v| reached(v) && notes(v)).or_else(|| args.iter().find(reached));
    found.or_else(|| args.iter().find(notes)).map_or(first, |v| v.tape())
}

/// The error of going back from what nothing that is trained took part in.
pub(crate) fn unreached(site: &'static Location<'static>) -> Error {
    let help = "no parameter took part in it, or it was made under no_grad or an inference tape";
    Error::new(Kind::Unsupported, "backward of a value that no gradient reaches")
        .detail("help", help)
        .at(site)
}

impl Keeper for Inner {
    fn forget(&self, recording: u32) {
        self.forms.borrow_mut().retain(|form| form.recording != recording);
    }
}

impl Value for Var {
    fn tensor(&self) -> &Tensor {
        &self.0.tensor
    }

    #[track_caller]
    fn apply(op: Rc<dyn Op>, args: &[&Self]) -> SmallVec<[Self; 2]> {
        Var::apply_at(op, args, Location::caller())
    }
}

impl fmt::Debug for Var {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Var({}, {:?})", self.0.tensor.layout(), self.0.id)
    }
}
