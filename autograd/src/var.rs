//! A variable: a tensor whose making is on a tape.

use crate::program::Slot;
use crate::tape::{Id, Key, Tape};
use shardgrad_dist::Result;
use shardgrad_tensor::ops::redistribute::Redistribute;
use shardgrad_tensor::{Layout, Op, Tensor, Value, op, unwind};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::fmt;
use std::panic::Location;
use std::rc::Rc;

/// A tensor on a tape. Cloning copies the handle. Without an id it is a constant: no gradient reaches it.
#[derive(Clone)]
pub struct Var(Rc<Inner>);

struct Inner {
    tensor: Tensor,
    tape: Tape,
    id: Option<Id>,
    slot: Option<Slot>,
    /// Other layouts of the same value, made once by implied steps and shared by all uses while this handle lives.
    forms: RefCell<SmallVec<[Var; 1]>>,
}

impl Var {
    pub(crate) fn new(tape: &Tape, tensor: Tensor, id: Option<Id>, slot: Option<Slot>) -> Var {
        Var(Rc::new(Inner { tensor, tape: tape.clone(), id, slot, forms: RefCell::default() }))
    }

    /// The tape this variable is on.
    #[must_use]
    pub fn tape(&self) -> &Tape {
        &self.0.tape
    }

    /// Whether a gradient reaches this variable.
    #[must_use]
    pub fn requires_grad(&self) -> bool {
        self.0.id.is_some()
    }

    /// The same value, cut off: no gradient flows through it.
    #[must_use]
    pub fn detach(&self) -> Var {
        Var::new(&self.0.tape, self.0.tensor.clone(), None, self.0.slot)
    }

    /// A plain tensor as a constant on the tape of this variable.
    #[must_use]
    pub fn constant(&self, tensor: Tensor) -> Var {
        self.0.tape.constant(tensor)
    }

    pub(crate) fn id(&self) -> Option<Id> {
        self.0.id
    }

    pub(crate) fn slot(&self) -> Option<Slot> {
        self.0.slot
    }

    pub(crate) fn key(&self) -> Option<Key> {
        self.0.tape.key_of(self.0.id?)
    }

    pub(crate) fn same_as(&self, other: &Var) -> bool {
        Rc::ptr_eq(&self.0, &other.0) || (self.0.id.is_some() && self.0.id == other.0.id)
    }

    /// The same value in another layout; the collective that leads there has its adjoint on the tape.
    ///
    /// # Panics
    /// Unwinds with the error if no route leads there.
    #[track_caller]
    #[must_use]
    pub fn to_layout(&self, to: &Layout) -> Var {
        if self.layout() == to { self.clone() } else { self.form(to, Location::caller()) }
    }

    /// Backpropagates from this scalar: gradients are added to the leaves of the tape, whose graph is used up.
    ///
    /// # Errors
    /// `Kind::Shape` if this is no scalar, `Kind::Unsupported` if no gradient reaches it.
    #[track_caller]
    pub fn backward(&self) -> Result<()> {
        self.0.tape.backward(self, Location::caller())
    }

    /// The number in a scalar, on every rank alike: every rank calls this together.
    ///
    /// # Errors
    /// `Kind::Shape` if there is more than one element; `Kind::Unsupported` while a program is recorded.
    #[track_caller]
    pub fn item(&self) -> Result<f64> {
        self.0.tape.check_readable(Location::caller())?;
        self.0.tensor.item()
    }

    /// Another layout of this value, made once.
    fn form(&self, to: &Layout, site: &'static Location<'static>) -> Var {
        if let Some(form) = self.0.forms.borrow().iter().find(|v| v.layout() == to) {
            return form.clone();
        }
        let form = match self.0.tape.leaf_form(self, to, site) {
            Some(form) => form,
            None => {
                let op = unwind(Redistribute::new(self.rank(), self.layout(), to));
                Var::apply_at(op, &[self], site).into_iter().next().expect("redistribute has one output")
            }
        };
        self.0.forms.borrow_mut().push(form.clone());
        form
    }

    fn apply_at(op: Rc<dyn Op>, args: &[&Var], site: &'static Location<'static>) -> SmallVec<[Var; 2]> {
        let first = args.first().expect("an op has at least one argument");
        let layouts: SmallVec<[&Layout; 4]> = args.iter().map(|v| v.layout()).collect();
        let inference = op::plan(&*op, first.rank(), &layouts, &[], site).unwrap_or_else(|e| e.raise());
        let args: SmallVec<[Var; 4]> = args
            .iter()
            .zip(&inference.targets)
            .map(|(v, target)| target.as_ref().map_or_else(|| (*v).clone(), |to| v.form(to, site)))
            .collect();
        let tensors: SmallVec<[Tensor; 4]> = args.iter().map(|v| v.0.tensor.clone()).collect();
        let outputs =
            op::run(&*op, &tensors, &inference, first.rank(), site).unwrap_or_else(|e| e.raise());
        first.0.tape.recorded_op(&op, &args, outputs, site)
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
