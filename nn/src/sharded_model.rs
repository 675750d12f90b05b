//! `Model`: a module on one rank of a mesh, with named parameters, sharded by a plan and initialized.

use crate::module::activation_point::with_placements;
use crate::module::name::{matches, nearest};
use crate::module::param::{Leader, Param};
use crate::module::precision::Precision;
use crate::module::watch::HooksVersion;
use crate::module::{Module, ModuleLeaf, visit_leaves};
use crate::plan::{ParamUse, Plan, RuleTarget};
use shardgrad_autograd::{BucketBytes, GatherOrder, GatherPolicy, GatheredLifetime, Key, Tape};
use shardgrad_tensor::{
    Axis, Context, DType, Error, Kind, Layout, Placement, Rank, Resharding, Result, Tensor,
};
use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Deref;
use std::rc::Rc;

/// A sharded model: this rank's part of a module whose parameters are laid out on the mesh by a [`Plan`]. It derefs to the module,
/// so `model.forward(..)` calls the module.
///
/// Every rank must build the same model: same module, plan and seed.
#[doc(alias = "DistributedDataParallel")]
#[doc(alias = "FSDP")]
#[doc(alias = "fully_shard")]
#[doc(alias = "parallelize_module")]
pub struct Model<M> {
    module: M,
    rank: Rank,
    /// The rank on the mesh of passes of single leaves of rows, if they are not on the mesh of the model.
    pass_rank: Option<Rank>,
    precision: Precision,
    params: Vec<Param>,
    unmatched_rules: Vec<String>,
    gather_groups: GroupedParams,
    /// The parameters whose gathered form is kept for the step.
    step_params: Vec<Param>,
    gather_order: Rc<GatherOrder>,
    /// Bytes up to which a pipeline rank keeps gathered parameters for the step; `None` for any number.
    gathered_bytes_max: Option<usize>,
    bucket_bytes: BucketBytes,
    /// The axes that shard the tokens of batches, outermost first.
    token_axes: Vec<Axis>,
    hooks: HooksVersion,
}

/// The parameters of each gather group, in traversal order, under the path of the module that the group is named after.
type GroupedParams = Vec<(String, Vec<Param>)>;

/// The ranks and the values of a model that is on its dry twin ([`Model::enter_dry_twin`]).
pub(crate) struct RealModel {
    rank: Rank,
    pass_rank: Option<Rank>,
    gather_order: Rc<GatherOrder>,
    /// The stored tensors, in the order of the parameters.
    stored: Vec<Option<Tensor>>,
}

/// The next free parameter key of a rank: keys are unique over all models of the rank, so that two models can share a tape.
#[derive(Default)]
struct KeyCounter(Cell<Key>);

impl<M: Module> Model<M> {
    /// Names every parameter by its path, lays it out as the plan states, and initializes it in f32. Initial values depend on
    /// seed, name and global index only, not on the mesh.
    ///
    /// # Errors
    /// `Kind::Config` for plan rules that cannot be parsed or match nothing, for a rule that need not match (`optional`, `one-of`) and
    /// matches some of the repeated blocks of the module but not one with parameters in place of its matches, for a mesh axis that the plan does not use
    /// ([`Plan::copies`]), for two parameters of one name, for a parameter that belongs to another model, and for a dim (of
    /// heads) sharded over more ranks than it has entries;
    /// `Kind::Layout` for a sharded dim that a parameter does not have; `Kind::OutOfMemory`.
    #[track_caller]
    pub fn new(rank: &Rank, module: M, plan: &Plan, seed: u64) -> Result<Model<M>> {
        Model::with_dtype(rank, module, plan, seed, DType::F32)
    }

    /// [`Model::new`] with parameters and computation in another float dtype.
    ///
    /// # Errors
    /// As [`Model::new`]; `Kind::DType` for a dtype that is not a float.
    #[track_caller]
    pub fn with_dtype(rank: &Rank, module: M, plan: &Plan, seed: u64, dtype: DType) -> Result<Model<M>> {
        Model::with_precision(rank, module, plan, seed, Precision::of(dtype))
    }

    /// [`Model::new`] in mixed precision: parameters stored in one float dtype, computation in another.
    ///
    /// # Errors
    /// As [`Model::new`] and [`Precision::check`].
    #[track_caller]
    pub fn with_precision(
        rank: &Rank,
        module: M,
        plan: &Plan,
        seed: u64,
        precision: Precision,
    ) -> Result<Model<M>> {
        let model = Model::without_values(rank, module, plan, precision)?;
        for param in &model.params {
            param.init_value(rank, seed, None)?;
        }
        Ok(model)
    }

    /// Names every parameter and gives it its layout, without allocating values (a model on the meta device).
    pub(crate) fn without_values(
        rank: &Rank,
        module: M,
        plan: &Plan,
        precision: Precision,
    ) -> Result<Model<M>> {
        Model::with_passes_on(rank, None, module, plan, precision)
    }

    /// [`Model::without_values`], whose passes run on a slice of the mesh, if one is given: without the axes that shard rows. Each use
    /// of a parameter in a pass has a gradient of its own then, under a key of its own
    /// ([`key_of_param`](crate::module::param::key_of_param)).
    pub(crate) fn with_passes_on(
        rank: &Rank,
        pass_rank: Option<Rank>,
        module: M,
        plan: &Plan,
        precision: Precision,
    ) -> Result<Model<M>> {
        let bound = BoundParams::new(rank, pass_rank.as_ref(), &module, plan, precision)?;
        Ok(Model {
            module,
            rank: rank.clone(),
            pass_rank,
            precision,
            params: bound.params,
            unmatched_rules: bound.unmatched_rules,
            gather_groups: bound.gather_groups,
            step_params: bound.step_params,
            gather_order: bound.gather_order,
            gathered_bytes_max: plan.gathered_bytes_max,
            bucket_bytes: bound.bucket_bytes,
            token_axes: plan.token_axes(rank.mesh()).collect(),
            hooks: HooksVersion::default(),
        })
    }

    /// The rank that holds this part of the model.
    #[must_use]
    pub fn rank(&self) -> &Rank {
        &self.rank
    }

    /// The rank on whose mesh passes run: that of the model, or the slice without the axes that shard rows.
    pub(crate) fn pass_rank(&self) -> &Rank {
        self.pass_rank.as_ref().unwrap_or(&self.rank)
    }

    /// Puts the model on a dry twin of its rank, and of the rank of passes if there is one: parameters have layouts and no values there.
    /// [`Model::leave_dry_twin`] puts it back.
    pub(crate) fn enter_dry_twin(&mut self, rank: Rank, pass_rank: Option<Rank>) -> RealModel {
        let meta = |param: &Param| param.is_local().then(|| Tensor::meta(&rank, &param.layout()));
        let stored = self.params.iter().map(|param| param.swap_value(meta(param))).collect();
        let gather_order = Rc::new(GatherOrder::new(0..self.gather_groups.len() as u32));
        RealModel {
            rank: std::mem::replace(&mut self.rank, rank),
            pass_rank: std::mem::replace(&mut self.pass_rank, pass_rank),
            gather_order: std::mem::replace(&mut self.gather_order, gather_order),
            stored,
        }
    }

    /// Puts the model back on its rank, with its values.
    pub(crate) fn leave_dry_twin(&mut self, real: RealModel) {
        for (param, stored) in self.params.iter().zip(real.stored) {
            param.swap_value(stored);
        }
        (self.rank, self.pass_rank, self.gather_order) = (real.rank, real.pass_rank, real.gather_order);
    }

    /// Runs passes with the parameters in the form of the mesh of passes: shards over the axes of rows are gathered first, and freed
    /// afterwards. A collective call if there are such shards.
    ///
    /// # Errors
    /// Those of `passes`; `Kind::OutOfMemory`; errors of the collectives.
    #[track_caller]
    pub(crate) fn with_pass_values<T>(&self, passes: impl FnOnce() -> Result<T>) -> Result<T> {
        let Some(pass_rank) = &self.pass_rank else { return passes() };
        // Also where a pass unwinds: the update must own the stored tensors.
        struct Freed<'a>(&'a [Param]);
        impl Drop for Freed<'_> {
            fn drop(&mut self) {
                self.0.iter().for_each(|param| param.set_pass_value(None));
            }
        }
        let freed = Freed(&self.params);
        for param in self.params.iter().filter(|param| param.is_local()) {
            Context::of(&self.rank).set_path(&param.shared_name());
            let stored = param.tensor();
            let whole = stored.to_layout(&self.layout_without_row_shards(&stored));
            let value = Tensor::assemble(pass_rank, param.pass_layout(), whole.local().clone());
            param.set_pass_value(Some(value));
        }
        let result = passes();
        drop(freed);
        result
    }

    /// Returns a gradient on the mesh of passes, equal on all ranks along the axes of rows, in the stored layout of its parameter.
    pub(crate) fn stored_gradient(&self, param: &Param, gradient: &Tensor) -> Tensor {
        let whole = self.layout_without_row_shards(&param.tensor());
        Tensor::assemble(&self.rank, whole, gradient.local().clone()).to_layout(&param.layout())
    }

    /// The layout of a stored tensor without shards over the axes of rows.
    fn layout_without_row_shards(&self, stored: &Tensor) -> Layout {
        let (mesh, pass_mesh) = (self.rank.mesh(), self.pass_rank().mesh());
        let rows = mesh.axes().filter(|axis| pass_mesh.axis(mesh.name(*axis)).is_none());
        rows.fold(stored.layout().clone(), |layout, axis| match layout.placement(axis) {
            Placement::Shard(_) => layout.with_placement(axis, Placement::Invariant),
            _ => layout,
        })
    }

    /// Lays ids `[1, t]`, equal on all ranks, out for a forward pass with a KV cache: tokens are sharded as those of batches. Fewer tokens
    /// than ranks stay copies: each rank computes them without communication where it has all keys.
    pub(crate) fn shard_new_tokens(&self, ids: Tensor) -> Tensor {
        let num_ranks: usize = self.token_axes.iter().map(|axis| self.rank.mesh().size(*axis)).product();
        if ids.shape()[1] < num_ranks {
            return ids;
        }
        let sharded = |layout: Layout, axis: &Axis| layout.with_placement(*axis, Placement::Shard(1));
        ids.to_layout(&self.token_axes.iter().fold(ids.layout().clone(), sharded))
    }

    /// The dtype of computation.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.precision.dtype
    }

    /// The dtypes of computation and of the stored parameters.
    #[must_use]
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// The optional rules of the plan that match nothing in this model: in the plan of a model family, those for biases and output
    /// layers that the model does not have.
    #[must_use]
    pub fn unmatched_rules(&self) -> &[String] {
        &self.unmatched_rules
    }

    /// Returns a tape that records a forward pass for backward; make a new one for each training step. A model with dropout needs
    /// [`Tape::set_noise`], which sets the random numbers of the step, before the forward pass.
    #[must_use]
    pub fn tape(&self) -> Tape {
        let tape = Tape::new(self.pass_rank()).with_bucket_bytes(self.bucket_bytes);
        if self.pass_rank.is_some() {
            return tape;
        }
        let members = |params: &[Param]| params.iter().filter_map(Param::gather_member).collect();
        let groups = self.gather_groups.iter().map(|(_, params)| members(params)).collect();
        tape.with_gather_groups(groups, &self.gather_order).with_step_gathers(members(&self.step_params))
    }

    /// The sizes of the buckets in which gradients are reduced.
    pub(crate) fn bucket_bytes(&self) -> BucketBytes {
        self.bucket_bytes
    }

    /// The groups in which the model gathers parameters that are stored as shards, in the order of the model: the module that a
    /// group is named after, and the names of its parameters. Empty unless the plan has stage 3 of [`Plan::zero`].
    #[must_use]
    pub fn gather_groups(&self) -> Vec<(&str, Vec<String>)> {
        let names = |params: &[Param]| params.iter().map(Param::name).collect();
        self.gather_groups.iter().map(|(module, params)| (module.as_str(), names(params))).collect()
    }

    /// The bytes of gathered parameters up to which a pipeline rank keeps them for the step; `None` for any number.
    pub(crate) fn gathered_bytes_max(&self) -> Option<usize> {
        self.gathered_bytes_max
    }

    /// Returns a tape that records nothing, for inference and validation.
    #[doc(alias = "no_grad")]
    #[doc(alias = "inference_mode")]
    #[doc(alias = "eval")]
    #[must_use]
    pub fn inference_tape(&self) -> Tape {
        Tape::inference(self.pass_rank())
    }

    /// The parameters in traversal order; a parameter shared by several layers comes once.
    #[doc(alias = "parameters")]
    #[doc(alias = "named_parameters")]
    #[doc(alias = "state_dict")]
    #[must_use]
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// The number of parameter elements of the whole model, over all ranks.
    #[must_use]
    pub fn num_params(&self) -> usize {
        self.params.iter().map(Param::numel).sum()
    }

    /// Returns the parameter of a dotted name.
    ///
    /// # Errors
    /// `Kind::Config` with the nearest names if there is none.
    #[doc(alias = "get_parameter")]
    pub fn param(&self, name: &str) -> Result<&Param> {
        self.params.iter().find(|p| p.name() == name).ok_or_else(|| self.unknown_param(name))
    }

    /// Freezes the parameters whose names match a pattern, so that they get no gradient and no update. Returns their number.
    ///
    /// # Errors
    /// `Kind::Config` with the nearest names if the pattern matches nothing.
    #[doc(alias = "requires_grad_")]
    pub fn freeze(&self, pattern: &str) -> Result<usize> {
        let found: Vec<&Param> = self.params.iter().filter(|p| matches(pattern, &p.name())).collect();
        found.iter().for_each(|p| p.set_frozen(true));
        if found.is_empty() { Err(self.unknown_param(pattern)) } else { Ok(found.len()) }
    }

    /// Freezes all parameters except those whose names match a pattern, which are unfrozen: `model.freeze_all_but("*.lora_*")`
    /// trains adapters alone. Returns the number of parameters that stay trainable.
    ///
    /// # Errors
    /// `Kind::Config` with the nearest names if the pattern matches nothing; no parameter has changed then.
    #[doc(alias = "mark_only_lora_as_trainable")]
    pub fn freeze_all_but(&self, pattern: &str) -> Result<usize> {
        let is_trained: Vec<bool> = self.params.iter().map(|p| matches(pattern, &p.name())).collect();
        let count = is_trained.iter().filter(|trained| **trained).count();
        if count == 0 {
            return Err(self.unknown_param(pattern));
        }
        self.params.iter().zip(is_trained).for_each(|(p, trained)| p.set_frozen(!trained));
        Ok(count)
    }

    /// The version of the hooks on activation points.
    pub(crate) fn hooks(&self) -> &HooksVersion {
        &self.hooks
    }

    fn unknown_param(&self, pattern: &str) -> Error {
        let names: Vec<String> = self.params.iter().map(Param::name).collect();
        let near = nearest(pattern, names.iter().map(String::as_str)).join(", ");
        Error::new(Kind::Config, format!("the model has no parameter `{pattern}`")).detail("nearest", near)
    }
}

impl<M> Deref for Model<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.module
    }
}

impl<M> fmt::Debug for Model<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.params).finish()
    }
}

/// The parameters and activation points of a module, named and laid out as a plan states: what of a [`Model`] does not depend on the type of
/// the module, so that it is not compiled for each.
struct BoundParams {
    params: Vec<Param>,
    unmatched_rules: Vec<String>,
    gather_groups: GroupedParams,
    step_params: Vec<Param>,
    gather_order: Rc<GatherOrder>,
    bucket_bytes: BucketBytes,
}

impl BoundParams {
    /// Binds each parameter and point of a module to its path and its layouts; see [`Model::with_passes_on`].
    fn new(
        rank: &Rank,
        pass_rank: Option<&Rank>,
        module: &dyn Module,
        plan: &Plan,
        precision: Precision,
    ) -> Result<BoundParams> {
        precision.check()?;
        plan.check()?;
        let NamedLeaves { params, uses, points } = named_leaves(module)?;
        let mut used = vec![false; plan.num_rules()];
        let mut layouts_on = |rank: &Rank| {
            let of = |(name, param): &(String, Param)| {
                let leader = param.leader().map(|leader| (leader, name_of(&params, &leader.param)));
                param_layouts(rank, plan, (name, param), leader, precision, &mut used)
            };
            params.iter().map(of).collect::<Result<Vec<_>>>()
        };
        let layouts = layouts_on(rank)?;
        let pass_layouts = pass_rank.map(layouts_on).transpose()?;
        let mut placements: HashMap<String, Vec<(Axis, Placement)>> = HashMap::with_capacity(points.len());
        let pass_mesh = pass_rank.unwrap_or(rank).mesh();
        for name in &points {
            placements
                .insert(name.clone(), plan.placements(RuleTarget::Point, name, None, pass_mesh, &mut used));
        }
        let names: Vec<&str> = params.iter().map(|(name, _)| name.as_str()).collect();
        let point_names: Vec<&str> = points.iter().map(String::as_str).collect();
        let unmatched_rules = plan.check_all_rules_matched(&used, &names, &point_names)?;
        plan.check_gather_groups_matched(&names)?;
        plan.check_regathered_points_matched(&point_names)?;
        plan.check_repeated_blocks(&param_uses(&params, &uses))?;
        plan.check_all_axes_used(rank.mesh(), &used)?;
        plan.check_one_zero_axis(rank.mesh())?;
        let (mut gather_groups, mut step_params) = (GroupedParams::new(), Vec::new());
        let gradient_bytes = gradient_bytes(rank, &layouts);
        for ((name, param), (stored, compute)) in params.iter().zip(layouts) {
            let policy = match &compute {
                Some(compute) => policy_in_group(plan, &mut gather_groups, (name, param), [&stored, compute]),
                None => GatherPolicy::default(),
            };
            if policy.lifetime == GatheredLifetime::Step {
                step_params.push(param.clone());
            }
            param.bind(name, next_key(rank), stored, compute, policy)?;
        }
        for ((_, param), (layout, compute)) in params.iter().zip(pass_layouts.into_iter().flatten()) {
            param.bind_pass(layout, compute);
        }
        let gather_order = Rc::new(GatherOrder::new(0..gather_groups.len() as u32));
        visit_leaves(module, &mut |path, leaf| {
            if let ModuleLeaf::Point(point) = leaf {
                let placements = placements.remove(path).unwrap_or_default();
                point.bind(path, placements, plan.is_regathered(path));
            }
        });
        let params = params.into_iter().map(|(_, param)| param).collect();
        let bucket_bytes = plan.bucket_bytes(rank.world().mesh(), gradient_bytes);
        Ok(BoundParams { params, unmatched_rules, gather_groups, step_params, gather_order, bucket_bytes })
    }
}

/// Parameters with their dotted paths.
type NamedParams = Vec<(String, Param)>;

/// The leaves of a module, in traversal order.
struct NamedLeaves {
    /// The parameters; shared ones under their first name.
    params: NamedParams,
    /// The path of each use of a parameter, and the index of the parameter.
    uses: Vec<(String, usize)>,
    /// The names of activation points.
    points: Vec<String>,
}

/// Returns the leaves of a module, of which no two have one name.
fn named_leaves(module: &dyn Module) -> Result<NamedLeaves> {
    let (mut params, mut uses, mut points) = (NamedParams::new(), Vec::new(), Vec::new());
    visit_leaves(module, &mut |path, leaf| match leaf {
        ModuleLeaf::Param(param) => {
            let index = params.iter().position(|(_, p)| p.ptr_eq(param)).unwrap_or(params.len());
            if index == params.len() {
                params.push((path.to_string(), param.clone()));
            }
            uses.push((path.to_string(), index));
        }
        ModuleLeaf::Point(_) => points.push(path.to_string()),
    });
    let mut seen = HashSet::new();
    let names = params.iter().map(|(name, _)| name).chain(&points);
    if let Some(twice) = names.into_iter().find(|name| !seen.insert(name.as_str())) {
        let error = Error::new(
            Kind::Config,
            format!("two parameters or points of the model have the name `{twice}`"),
        );
        return Err(error.detail("help", "give each child a different name in Module::children"));
    }
    Ok(NamedLeaves { params, uses, points })
}

/// The uses of parameters as a plan compares them.
fn param_uses<'a>(params: &'a NamedParams, uses: &'a [(String, usize)]) -> Vec<ParamUse<'a>> {
    let of = |(path, index): &'a (String, usize)| {
        let (name, param) = &params[*index];
        let (is_matrix, has_leader) = (param.has_weight_decay(), param.leader().is_some());
        ParamUse { path, name, shape: param.shape(), is_matrix, has_leader }
    };
    uses.iter().map(of).collect()
}

/// How a tape treats a parameter of these stored and computed layouts. Adds the parameter to its gather group, if it has one.
fn policy_in_group(
    plan: &Plan,
    groups: &mut GroupedParams,
    (name, param): (&str, &Param),
    [stored, computed]: [&Layout; 2],
) -> GatherPolicy {
    let module = plan.gather_group_of(name);
    let group = groups.iter().position(|(known, _)| known == module).unwrap_or(groups.len());
    let policy = plan.gather_policy(stored, computed, group as u32);
    if matches!(policy.lifetime, GatheredLifetime::Group(_)) {
        if group == groups.len() {
            groups.push((module.to_string(), Vec::new()));
        }
        groups[group].1.push(param.clone());
    }
    policy
}

/// The first name of a parameter; empty if the model does not have the parameter.
fn name_of<'a>(params: &'a NamedParams, param: &Param) -> &'a str {
    params.iter().find(|(_, p)| p.ptr_eq(param)).map_or("", |(name, _)| name)
}

/// Returns the stored layout of a parameter, and its compute layout where that differs. Rules by the parameter's own name override,
/// per axis, the placements of the parameter that it is sharded like.
fn param_layouts(
    rank: &Rank,
    plan: &Plan,
    (name, param): (&str, &Param),
    leader: Option<(&Leader, &str)>,
    precision: Precision,
    used: &mut [bool],
) -> Result<(Layout, Option<Layout>)> {
    let targets = [RuleTarget::Store, RuleTarget::Compute];
    let mut placements = |name: &str, param: &Param| {
        targets.map(|target| plan.placements(target, name, Some(param.shape()), rank.mesh(), used))
    };
    let own = placements(name, param);
    let [store, compute] = match leader {
        None => own,
        Some((_, "")) => {
            let text = format!("parameter `{name}` is sharded like a parameter that the model does not have");
            let help = "adapt a model last, after the methods that return the same layer with another weight";
            return Err(Error::new(Kind::Config, text).detail("help", help));
        }
        Some((leader, leader_name)) => {
            let [store, compute] = placements(leader_name, &leader.param);
            overridden(leader.placements_of_follower([&store, &compute]), own)
        }
    };
    let plain = Layout::invariant(rank.mesh(), precision.param_dtype, param.shape());
    let make = || {
        let stored = with_placements(&plain, &store)?;
        let computed = with_placements(&stored.with_dtype(precision.dtype), &compute)?;
        Ok((stored, computed))
    };
    let name_parameter = |e: Error| e.detail("parameter", format!("{name} {:?}", param.shape()));
    let (stored, computed) = make().map_err(name_parameter)?;
    let computed = (computed != stored).then_some(computed);
    Ok((stored, computed))
}

/// The bytes of the gradients of a rank before they are reduced, from the stored and computed layouts of all parameters: the most of all
/// ranks, and for a stage of a pipeline the mean of the stages.
fn gradient_bytes(rank: &Rank, layouts: &[(Layout, Option<Layout>)]) -> usize {
    let bytes = |(stored, computed): &(Layout, Option<Layout>)| {
        let dims = computed.as_ref().unwrap_or(stored).dims().iter();
        let numel: usize = dims.map(|dim| dim.max_local_extent(rank.mesh())).product();
        numel * stored.dtype().size()
    };
    let num_stages = rank.world().mesh().num_ranks() / rank.mesh().num_ranks();
    layouts.iter().map(bytes).sum::<usize>() / num_stages
}

/// Returns the placements by rules of a name where there are some for an axis, and else the inherited ones.
fn overridden(
    inherited: [Vec<(Axis, Placement)>; 2],
    [own_store, own_compute]: [Vec<(Axis, Placement)>; 2],
) -> [Vec<(Axis, Placement)>; 2] {
    let [mut store, mut compute] = inherited;
    store.retain(|(axis, _)| own_store.iter().all(|(own, _)| own != axis));
    compute.retain(|(axis, _)| own_compute.iter().all(|(own, _)| own != axis));
    [[store, own_store].concat(), [compute, own_compute].concat()]
}

fn next_key(rank: &Rank) -> Key {
    let keys = rank.extension::<KeyCounter>();
    keys.0.replace(keys.0.get() + 1)
}
