//! Parameters: declared by layers; named, sharded and initialized by [`Model`](crate::Model).

use crate::module::name::random_key;
use shardgrad_autograd::{GatherMember, GatherPolicy, Key, Tape, Var};
use shardgrad_tensor::{
    Axis, Context, DType, Error, Kind, Layout, Placement, Rank, Resharding, Result, StepReport, Tensor, Value,
};
use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::Location;
use std::rc::Rc;

/// How a parameter is initialized. Values depend on seed, name and global element index only, not on the mesh.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All zeros.
    Zeros,
    /// All ones.
    Ones,
    /// Normal distribution with mean 0 and this standard deviation.
    Normal(f64),
    /// Uniform distribution between minus and plus this bound.
    Uniform(f64),
    /// Integers between minus and plus this bound, equally likely. Sums of their products are exact, so runs on different meshes
    /// can be compared bit for bit.
    Integers(u32),
}

/// A parameter of a model. Cloning copies the handle: two layers that hold clones of one parameter share it (weight tying), and its
/// name is the path under which traversal meets it first.
#[doc(alias = "Parameter")]
#[doc(alias = "weight tying")]
#[derive(Clone)]
pub struct Param(Rc<Inner>);

struct Inner {
    spec: ParamSpec,
    state: RefCell<Option<ParamState>>,
    frozen: Cell<bool>,
    /// The number of averages that were put in place of the stored tensor, one over the other.
    averages_in_place: Cell<i32>,
}

#[derive(Clone, Debug)]
struct ParamSpec {
    shape: Vec<usize>,
    file_shape: Option<Vec<usize>>,
    /// The order of the dims in files, where it differs.
    file_order: Option<Vec<usize>>,
    init: Init,
    /// The parameter that this one is sharded like, if no rule of the plan says otherwise.
    leader: Option<Leader>,
    /// What changes the parameter after a step, if not a gradient.
    step_rule: Option<StepRule>,
}

/// Changes a parameter after a step, from the report of the step.
type ChangeAfterStep = dyn Fn(&Param, &StepReport) -> Result<()>;

/// The function of [`Param::after_step`].
#[derive(Clone)]
struct StepRule(Rc<ChangeAfterStep>);

impl fmt::Debug for StepRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StepRule(..)")
    }
}

/// A parameter whose placements another one follows.
#[derive(Clone, Debug)]
pub(crate) struct Leader {
    pub(crate) param: Param,
    /// For each dim of the leader, the dim of the follower that is sharded with it.
    dims: Vec<Option<usize>>,
}

impl Leader {
    /// The stored and computed placements of the follower from those of the leader. Where the leader is sharded along a dim that
    /// the follower does not have, the follower is computed as a replica: each rank uses it for its part of the work.
    pub(crate) fn placements_of_follower(
        &self,
        [stored, computed]: [&[(Axis, Placement)]; 2],
    ) -> [Vec<(Axis, Placement)>; 2] {
        let own_dim = |dim: usize| self.dims.get(dim).copied().flatten();
        let (mut own_stored, mut own_computed) = (Vec::new(), Vec::new());
        for &(axis, placement) in stored {
            match placement {
                Placement::Shard(dim) => match own_dim(dim) {
                    Some(dim) => own_stored.push((axis, Placement::Shard(dim))),
                    None => own_computed.push((axis, Placement::Replicate)),
                },
                other => own_stored.push((axis, other)),
            }
        }
        for &(axis, placement) in computed {
            own_computed.retain(|(known, _)| *known != axis);
            own_computed.push(match placement {
                Placement::Shard(dim) => (axis, own_dim(dim).map_or(Placement::Replicate, Placement::Shard)),
                other => (axis, other),
            });
        }
        [own_stored, own_computed]
    }
}

struct ParamState {
    name: Rc<str>,
    key: Key,
    layout: Layout,
    /// `None` before initialization, on ranks of other pipeline stages, and after a failed update.
    stored: Option<Tensor>,
    compute_layout: Option<Layout>,
    gather_policy: GatherPolicy,
    owners: Option<StageOwners>,
    pass: Option<PassForm>,
}

/// The form in which passes of single leaves of rows use a parameter: on the mesh without the axes of rows, and each use with a
/// gradient of its own.
struct PassForm {
    layout: Layout,
    compute_layout: Option<Layout>,
    /// `Some` while passes run.
    value: Option<Tensor>,
}

/// The bits of a key below the number of the use.
const KEY_BITS: u32 = 40;

/// Returns the key of the parameter of which a key is a use ([`Param::on_tape`]).
pub(crate) fn key_of_param(key: Key) -> Key {
    key & ((1 << KEY_BITS) - 1)
}

/// The ranks of a pipeline axis that hold a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StageOwners {
    /// The pipeline axis of the world's mesh.
    pub(crate) axis: Axis,
    /// The pipeline ranks that hold the parameter, in ascending order.
    pub(crate) ranks: Vec<usize>,
    /// The pipeline rank of this process.
    pub(crate) own_rank: usize,
}

/// Refuses what must not happen while averages are in place of parameters; `why` ends the sentence.
pub(crate) fn check_no_averages(params: &[Param], why: &str) -> Result<()> {
    let Some(first) = params.iter().find(|param| param.has_average_in_place()) else { return Ok(()) };
    let text = format!("averages are in place of the parameters, `{}` first: {why}", first.name());
    Err(Error::new(Kind::Config, text).detail("help", "drop the result of Ema::swap_in first"))
}

impl Param {
    /// Declares a parameter of a global shape, initialized with zeros.
    #[must_use]
    pub fn new(shape: &[usize]) -> Param {
        Param::declare(ParamSpec {
            shape: shape.to_vec(),
            file_shape: None,
            file_order: None,
            init: Init::Zeros,
            leader: None,
            step_rule: None,
        })
    }

    fn declare(spec: ParamSpec) -> Param {
        let (frozen, averages_in_place) = (Cell::new(false), Cell::new(0));
        Param(Rc::new(Inner { spec, state: RefCell::default(), frozen, averages_in_place }))
    }

    fn change(self, change: impl FnOnce(&mut ParamSpec)) -> Param {
        let mut spec = self.0.spec.clone();
        change(&mut spec);
        Param::declare(spec)
    }

    /// Returns the same declaration with another initializer.
    #[must_use]
    pub fn init(self, init: Init) -> Param {
        self.change(|d| d.init = init)
    }

    /// Returns the same declaration with another shape in files (same number of elements, same order).
    ///
    /// # Panics
    /// If the shape has another number of elements than the parameter.
    #[must_use]
    pub fn with_file_shape(self, shape: &[usize]) -> Param {
        assert_eq!(
            shape.iter().product::<usize>(),
            self.shape().iter().product::<usize>(),
            "a file shape has as many elements as the parameter"
        );
        self.change(|d| d.file_shape = Some(shape.to_vec()))
    }

    /// Returns the same declaration with permuted dims in files: dim i in files is dim `order[i]` of the parameter. A file shape, if
    /// declared, is the shape after the permutation.
    ///
    /// # Panics
    /// If `order` has another length than the shape.
    #[must_use]
    pub fn with_file_order(self, order: &[usize]) -> Param {
        assert_eq!(order.len(), self.shape().len(), "an order names every dim");
        self.change(|d| d.file_order = Some(order.to_vec()))
    }

    /// Returns the same declaration, sharded as another parameter of the model is on the axes for which the plan has no rule by its
    /// own name. Dim d of `leader` corresponds to dim `dims[d]` of this parameter, or to none.
    #[must_use]
    pub fn sharded_like(self, leader: &Param, dims: &[Option<usize>]) -> Param {
        self.change(|d| d.leader = Some(Leader { param: leader.clone(), dims: dims.to_vec() }))
    }

    /// The parameter that this one is sharded like.
    pub(crate) fn leader(&self) -> Option<&Leader> {
        self.0.spec.leader.as_ref()
    }

    /// The global shape.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.0.spec.shape
    }

    /// The shape in files.
    #[must_use]
    pub fn file_shape(&self) -> Vec<usize> {
        let ParamSpec { shape, file_shape, file_order, .. } = &self.0.spec;
        match (file_shape, file_order) {
            (Some(shape), _) => shape.clone(),
            (None, Some(order)) => order.iter().map(|d| shape[*d]).collect(),
            (None, None) => shape.clone(),
        }
    }

    /// Whether the dims are in another order in files: matrices are transposed there, `[out, in]`, as in PyTorch.
    pub(crate) fn is_transposed_in_files(&self) -> bool {
        self.0.spec.file_order.as_ref().is_some_and(|order| !order.is_sorted())
    }

    /// Returns the stored tensor with its dims in file order.
    #[track_caller]
    pub(crate) fn tensor_in_file_order(&self) -> Tensor {
        self.permute_to_file_order(self.tensor())
    }

    /// Permutes the dims of a tensor in the parameter's layout to file order.
    #[track_caller]
    pub(crate) fn permute_to_file_order(&self, tensor: Tensor) -> Tensor {
        match &self.0.spec.file_order {
            Some(order) => tensor.permute(order),
            None => tensor,
        }
    }

    /// Permutes the dims of a tensor in file order to the parameter's order.
    ///
    /// # Errors
    /// `Kind::OutOfMemory`.
    #[track_caller]
    pub(crate) fn permute_from_file_order(&self, tensor: Tensor) -> Result<Tensor> {
        let Some(order) = &self.0.spec.file_order else { return Ok(tensor) };
        let mut back = vec![0; order.len()];
        order.iter().enumerate().for_each(|(i, d)| back[*d] = i);
        tensor.permute(&back).contiguous()
    }

    /// Replaces the stored tensor by a tensor whose dims are in file order.
    ///
    /// # Errors
    /// As [`Param::set_tensor`].
    #[track_caller]
    pub(crate) fn set_from_file_order(&self, tensor: Tensor) -> Result<()> {
        self.set_tensor(self.permute_from_file_order(tensor)?)
    }

    /// The number of elements of the global shape.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.shape().iter().product()
    }

    /// Whether weight decay applies: to parameters with two or more dims in files, so not to biases and norms.
    #[doc(alias = "no_decay")]
    #[must_use]
    pub fn has_weight_decay(&self) -> bool {
        self.file_shape().len() >= 2
    }

    /// The initializer.
    #[must_use]
    pub fn initializer(&self) -> Init {
        self.0.spec.init
    }

    /// Whether the parameter gets no gradient.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        self.0.frozen.get()
    }

    /// Freezes the parameter, so that it gets no gradient and no update, or unfreezes it.
    #[doc(alias = "requires_grad_")]
    pub fn set_frozen(&self, frozen: bool) {
        self.0.frozen.set(frozen);
    }

    /// Counts an average that is put in place of the stored tensor (1) or leaves (-1).
    pub(crate) fn count_averages_in_place(&self, change: i32) {
        self.0.averages_in_place.set(self.0.averages_in_place.get() + change);
    }

    /// Whether the stored tensor is an average of the parameter ([`Ema::swap_in`](crate::Ema::swap_in)).
    pub(crate) fn has_average_in_place(&self) -> bool {
        self.0.averages_in_place.get() > 0
    }

    /// Whether two handles refer to the same parameter.
    #[must_use]
    pub fn ptr_eq(&self, other: &Param) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// Returns the parameter as a variable on the tape of `x`, in its compute layout. The first use on a tape moves it there (the
    /// all-gather of FSDP); later uses reuse the result.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` before [`Model::new`](crate::Model::new).
    #[track_caller]
    #[must_use]
    pub fn on(&self, x: &Var) -> Var {
        self.on_tape(x.tape())
    }

    /// Returns the parameter as a variable on a tape, as [`Param::on`].
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` before [`Model::new`](crate::Model::new).
    #[track_caller]
    #[must_use]
    pub fn on_tape(&self, tape: &Tape) -> Var {
        self.on_tape_at(tape, Location::caller())
    }

    /// [`Param::on_tape`] for the caller's line `site`.
    pub(crate) fn on_tape_at(&self, tape: &Tape, site: &'static Location<'static>) -> Var {
        let (key, stored, compute_layout, policy) = self.with(site, |state| {
            Context::of(tape.rank()).set_path(&state.name);
            let (key, layout, compute_layout, policy) = match &state.pass {
                None => (state.key, &state.layout, &state.compute_layout, state.gather_policy),
                Some(pass) => {
                    let key = state.key | tape.count_use(state.key) << KEY_BITS;
                    (key, &pass.layout, &pass.compute_layout, GatherPolicy::default())
                }
            };
            let stored = match tape.is_meta() {
                true => Tensor::meta(tape.rank(), layout),
                false => state.pass_value().clone(),
            };
            (key, stored, compute_layout.clone(), policy)
        });
        let leaf = tape.leaf_with_policy_at(key, &stored, policy, site);
        // A frozen parameter is a leaf too, so that its compute layout is made once per tape.
        let leaf = if self.is_frozen() && !tape.is_meta() { leaf.detach() } else { leaf };
        match compute_layout {
            Some(layout) => leaf.to_layout_at(&layout, site),
            None => leaf,
        }
    }

    /// The dotted name.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` before [`Model::new`](crate::Model::new), as do the methods below.
    #[track_caller]
    #[must_use]
    pub fn name(&self) -> String {
        self.with(Location::caller(), |state| state.name.to_string())
    }

    /// The dotted name, without a copy.
    #[track_caller]
    pub(crate) fn shared_name(&self) -> Rc<str> {
        self.with(Location::caller(), |state| state.name.clone())
    }

    /// The key of the parameter on tapes and in [`Gradients`](shardgrad_autograd::Gradients): unique over all models of the
    /// rank, counted in traversal order.
    #[track_caller]
    #[must_use]
    pub fn key(&self) -> Key {
        self.with(Location::caller(), |state| state.key)
    }

    /// The stored layout.
    #[track_caller]
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.with(Location::caller(), |state| state.layout.clone())
    }

    /// Whether this rank holds the parameter. On a pipeline only the stages that use a parameter hold it.
    #[track_caller]
    #[must_use]
    pub fn is_local(&self) -> bool {
        self.owners().is_none_or(|owners| owners.ranks.contains(&owners.own_rank))
    }

    /// Whether this rank belongs to the first stage that holds the parameter. That stage counts the parameter in norms and saves it.
    #[track_caller]
    #[must_use]
    pub fn is_primary_owner(&self) -> bool {
        self.owners().is_none_or(|owners| owners.ranks.first() == Some(&owners.own_rank))
    }

    /// The pipeline ranks that hold the parameter; `None` without a pipeline.
    #[track_caller]
    pub(crate) fn owners(&self) -> Option<StageOwners> {
        self.with(Location::caller(), |state| state.owners.clone())
    }

    /// The stored tensor.
    ///
    /// # Panics
    /// Also on ranks that do not hold the parameter ([`Param::is_local`]).
    #[track_caller]
    #[must_use]
    pub fn tensor(&self) -> Tensor {
        self.with(Location::caller(), |state| state.value().clone())
    }

    /// The tensor that passes use: the stored one, or its form on the mesh without the axes of rows.
    ///
    /// # Panics
    /// As [`Param::tensor`].
    #[track_caller]
    pub(crate) fn pass_tensor(&self) -> Tensor {
        self.with(Location::caller(), |state| state.pass_value().clone())
    }

    /// The layout of [`Param::pass_tensor`].
    #[track_caller]
    pub(crate) fn pass_layout(&self) -> Layout {
        self.with(Location::caller(), |state| {
            state.pass.as_ref().map_or(&state.layout, |pass| &pass.layout).clone()
        })
    }

    /// Sets the layouts of the form that passes of single leaves of rows use.
    pub(crate) fn bind_pass(&self, layout: Layout, compute_layout: Option<Layout>) {
        if let Some(state) = self.0.state.borrow_mut().as_mut() {
            state.pass = Some(PassForm { layout, compute_layout, value: None });
        }
    }

    /// Sets or drops the tensor that passes use.
    pub(crate) fn set_pass_value(&self, value: Option<Tensor>) {
        if let Some(pass) = self.0.state.borrow_mut().as_mut().and_then(|state| state.pass.as_mut()) {
            pass.value = value;
        }
    }

    /// The layout and dtype in which layers use the parameter, where they differ from the stored ones.
    #[track_caller]
    #[must_use]
    pub fn compute_layout(&self) -> Option<Layout> {
        self.with(Location::caller(), |state| state.compute_layout.clone())
    }

    /// How long a tape keeps the gathered form, and when it reduces the gradient.
    #[track_caller]
    pub(crate) fn gather_policy(&self) -> GatherPolicy {
        self.with(Location::caller(), |state| state.gather_policy)
    }

    /// The parameter as a member of its gather group; `None` on ranks that do not hold it.
    pub(crate) fn gather_member(&self) -> Option<GatherMember> {
        self.with(Location::caller(), |state| {
            let (stored, computed) = (state.stored.clone()?, state.compute_layout.clone()?);
            let (key, policy, path) = (state.key, state.gather_policy, state.name.clone());
            Some(GatherMember { key, stored, computed, policy, path })
        })
    }

    /// Replaces the stored tensor.
    ///
    /// # Errors
    /// `Kind::Layout` if the layout differs from the stored one.
    #[track_caller]
    pub fn set_tensor(&self, tensor: Tensor) -> Result<()> {
        let (name, layout) = self.with(Location::caller(), |p| (p.name.clone(), p.layout.clone()));
        if layout != *tensor.layout() {
            let text = format!(
                "parameter `{name}` has the stored layout {layout}, but the new tensor has {}",
                tensor.layout()
            );
            let help = "move the tensor to the layout of the parameter with `to_layout` first";
            return Err(Error::new(Kind::Layout, text).detail("help", help).at(Location::caller()));
        }
        let mut state = self.0.state.borrow_mut();
        state.as_mut().ok_or_else(without_model)?.stored = Some(tensor);
        Ok(())
    }

    /// Exchanges the stored tensor for one of the same layout, or for none, and returns it.
    pub(crate) fn swap_value(&self, tensor: Option<Tensor>) -> Option<Tensor> {
        let mut state = self.0.state.borrow_mut();
        state.as_mut().and_then(|state| std::mem::replace(&mut state.stored, tensor))
    }

    /// Adds one number to each element, in row-major order of the global shape, in place. Every rank that holds the parameter calls this
    /// together.
    ///
    /// # Errors
    /// `Kind::Shape` for another number of elements; `Kind::OutOfMemory`.
    #[track_caller]
    pub(crate) fn add_values(&self, values: &[f64]) -> Result<()> {
        let change = {
            let stored = self.tensor();
            Tensor::from_host(stored.rank(), self.shape(), values)?
                .cast(stored.dtype())
                .to_layout(stored.layout())
        };
        Param::update_all(std::iter::once(self), |stored| {
            let changed: Result<Vec<Tensor>> =
                stored.into_iter().map(|tensor| tensor.accumulate(&change)).collect();
            match changed {
                Ok(changed) => (changed, Ok(())),
                Err(error) => (Vec::new(), Err(error)),
            }
        })
    }

    /// Returns the same declaration with a function that a trainer calls after each step that changed the parameters, with the report
    /// of the step, on the ranks that hold the parameter: for values that follow from statistics of the batch instead of gradients.
    /// The function changes the parameter to the same value on every rank. Freeze such a parameter.
    #[doc(alias = "buffer")]
    #[doc(alias = "register_buffer")]
    #[must_use]
    pub fn after_step(self, rule: impl Fn(&Param, &StepReport) -> Result<()> + 'static) -> Param {
        self.change(|spec| spec.step_rule = Some(StepRule(Rc::new(rule))))
    }

    /// Calls the function of [`Param::after_step`], if there is one and this rank holds the parameter.
    pub(crate) fn apply_step_rule(&self, report: &StepReport) -> Result<()> {
        match self.0.spec.step_rule.as_ref().filter(|_| self.is_local()) {
            Some(StepRule(rule)) => rule(self, report),
            None => Ok(()),
        }
    }

    /// Replaces the stored tensors of several parameters by a function of them. The function owns the model's only handles, so that
    /// it can update in place; it returns the tensors in the same order, also when it fails.
    pub(crate) fn update_all<'a>(
        params: impl Iterator<Item = &'a Param> + Clone,
        change: impl FnOnce(Vec<Tensor>) -> (Vec<Tensor>, Result<()>),
    ) -> Result<()> {
        let take = |param: &Param| {
            let mut state = param.0.state.borrow_mut();
            let state = state.as_mut().ok_or_else(without_model)?;
            state.stored.take().ok_or_else(|| lost_value(&state.name))
        };
        let stored = params.clone().map(take).collect::<Result<Vec<Tensor>>>()?;
        let (changed, done) = change(stored);
        for (param, tensor) in params.zip(changed) {
            param.0.state.borrow_mut().as_mut().ok_or_else(without_model)?.stored = Some(tensor);
        }
        done
    }

    /// Copies the stored tensor if another handle shares its memory, so that updates can be in place.
    pub(crate) fn make_unique(&self) -> Result<()> {
        let own = |mut tensors: Vec<Tensor>| {
            let done = tensors.iter_mut().try_for_each(Tensor::make_unique);
            (tensors, done)
        };
        Param::update_all(std::iter::once(self), own)
    }

    /// Drops the stored value after a failed update, when it belongs to no step.
    pub(crate) fn clear_value(&self) {
        if let Some(state) = self.0.state.borrow_mut().as_mut() {
            state.stored = None;
        }
    }

    /// Gives the parameter its name, key and layouts, without a value.
    ///
    /// # Errors
    /// `Kind::Config` if the parameter belongs to a model already.
    pub(crate) fn bind(
        &self,
        name: &str,
        key: Key,
        layout: Layout,
        compute_layout: Option<Layout>,
        gather_policy: GatherPolicy,
    ) -> Result<()> {
        let mut state = self.0.state.borrow_mut();
        if let Some(before) = state.as_ref() {
            let text = format!("parameter `{name}` already belongs to another model, as `{}`", before.name);
            return Err(Error::new(Kind::Config, text)
                .detail("help", "make new layers for each model instead of sharing them between models"));
        }
        let (name, stored, owners, pass) = (name.into(), None, None, None);
        *state = Some(ParamState { name, key, layout, stored, compute_layout, gather_policy, owners, pass });
        Ok(())
    }

    /// Sets the pipeline ranks that hold the parameter.
    pub(crate) fn set_owners(&self, owners: Option<StageOwners>) {
        if let Some(state) = self.0.state.borrow_mut().as_mut() {
            state.owners = owners;
        }
    }

    /// Initializes the parameter if this rank holds it.
    #[track_caller]
    pub(crate) fn init_value(&self, rank: &Rank, seed: u64, owners: Option<StageOwners>) -> Result<()> {
        self.set_owners(owners);
        if !self.is_local() {
            return Ok(());
        }
        let (layout, site) = (self.layout(), Location::caller());
        let drawn = initial_value(self, &layout, rank, random_key(seed, &self.name())).map_err(|error| match error.kind() {
            Kind::OutOfMemory => error
                .detail("parameter", format!("{}: {layout}", self.name()))
                .detail("help", "shard the parameter over more ranks in the plan, use a smaller dtype, or raise the memory limit")
                .at(site),
            _ => error.at(site),
        });
        self.set_tensor(drawn?)
    }

    fn with<T>(&self, site: &'static Location<'static>, read: impl FnOnce(&ParamState) -> T) -> T {
        match self.0.state.borrow().as_ref() {
            Some(state) => read(state),
            None => without_model().at(site).raise(),
        }
    }
}

impl ParamState {
    /// The tensor that passes use.
    fn pass_value(&self) -> &Tensor {
        self.pass.as_ref().and_then(|pass| pass.value.as_ref()).unwrap_or_else(|| self.value())
    }

    fn value(&self) -> &Tensor {
        self.stored.as_ref().unwrap_or_else(|| match &self.owners {
            Some(owners) if !owners.ranks.contains(&owners.own_rank) => {
                on_another_stage(&self.name, owners).raise()
            }
            _ => lost_value(&self.name).raise(),
        })
    }
}

fn without_model() -> Error {
    Error::new(Kind::Config, "a parameter is used before Model::new has named and initialized it")
        .detail("help", "pass the layers to Model::new(rank, layers, &plan, seed), then call the model")
}

fn on_another_stage(name: &str, owners: &StageOwners) -> Error {
    let text = format!(
        "parameter `{name}` is on pipeline ranks {:?}, not on rank {}",
        owners.ranks, owners.own_rank
    );
    Error::new(Kind::Config, text).detail("help", "check Param::is_local before reading the parameter")
}

fn lost_value(name: &str) -> Error {
    Error::new(Kind::Config, format!("parameter `{name}` has no value: an update of it failed"))
        .detail("help", LOST_VALUE_HELP)
}

/// The remedy for parameters without a value.
pub(crate) const LOST_VALUE_HELP: &str = "resume from the last saved model or checkpoint";

impl fmt::Debug for Param {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.state.borrow().as_ref() {
            Some(state) => {
                write!(f, "Param({}: {})", state.name, state.layout)
            }
            None => write!(f, "Param({:?})", self.shape()),
        }
    }
}

/// Draws the initial value of a parameter.
#[track_caller]
fn initial_value(param: &Param, layout: &Layout, rank: &Rank, key: u64) -> Result<Tensor> {
    match param.initializer() {
        Init::Zeros => Tensor::zeros(rank, layout),
        Init::Ones => Tensor::full(rank, layout, 1.0),
        Init::Normal(std) => Tensor::normal(rank, layout, key, 0, std),
        Init::Uniform(bound) => Tensor::uniform(rank, layout, key, 0, -bound, bound),
        Init::Integers(bound) => {
            let bound = f64::from(bound);
            // In f64, where the draw never reaches the upper bound; the cast to integers rounds towards zero.
            let wide = layout.with_dtype(DType::F64);
            let drawn = Tensor::uniform(rank, &wide, key, 0, 0.0, 2.0 * bound + 1.0)?;
            Ok(drawn.cast(DType::I64).cast(DType::F64).add_scalar(-bound).cast(layout.dtype()))
        }
    }
}
