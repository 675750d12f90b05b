//! A model: a module whose parameters are named, placed on the mesh and filled.

use crate::module::{Leaf, Module, walk};
use crate::name::{matches, nearest};
use crate::param::Param;
use crate::plan::{Plan, Subject};
use crate::point::with_states;
use crate::precision::Precision;
use shardgrad_autograd::{Key, Tape};
use shardgrad_tensor::{Axis, DType, Error, Kind, Layout, Rank, Result, State};
use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Deref;

/// A module in use on one rank. It derefs to the module, so `model.forward(..)` is the module's own.
///
/// Every rank makes its model alike: the same module, plan and seed.
pub struct Model<M> {
    module: M,
    rank: Rank,
    precision: Precision,
    params: Vec<Param>,
}

/// The keys that the models of a rank have used up, so that two models can share a tape.
#[derive(Default)]
struct Keys(Cell<Key>);

impl<M: Module> Model<M> {
    /// Names every parameter by its path, places it as the plan says, and fills it in f32. Values depend on seed, name
    /// and global index only.
    ///
    /// # Errors
    /// `Kind::Config` for a plan with rules that cannot be read or match nothing, for parameters of one name, for one
    /// that another model has, and for a split into more parts than a parameter can have (heads);
    /// `Kind::Layout` for a split of a dim that a parameter does not have; `Kind::OutOfMemory`.
    #[track_caller]
    pub fn new(rank: &Rank, module: M, plan: &Plan, seed: u64) -> Result<Model<M>> {
        Model::with_dtype(rank, module, plan, seed, DType::F32)
    }

    /// [`Model::new`] in another float dtype, parameters included.
    ///
    /// # Errors
    /// As [`Model::new`], and `Kind::DType` for a dtype that is no float.
    #[track_caller]
    pub fn with_dtype(rank: &Rank, module: M, plan: &Plan, seed: u64, dtype: DType) -> Result<Model<M>> {
        Model::with_precision(rank, module, plan, seed, Precision::of(dtype))
    }

    /// [`Model::new`] with parameters stored in one float dtype and computed with in another.
    ///
    /// # Errors
    /// As [`Model::new`], and as [`Precision::check`].
    #[track_caller]
    pub fn with_precision(
        rank: &Rank,
        module: M,
        plan: &Plan,
        seed: u64,
        precision: Precision,
    ) -> Result<Model<M>> {
        let model = Model::outline(rank, module, plan, precision)?;
        for param in &model.params {
            param.fill(rank, seed, None)?;
        }
        Ok(model)
    }

    /// Names and places every parameter, without values.
    pub(crate) fn outline(rank: &Rank, module: M, plan: &Plan, precision: Precision) -> Result<Model<M>> {
        precision.check()?;
        plan.check()?;
        let (params, points) = leaves(&module)?;
        let mut used = vec![false; plan.num_rules()];
        let mut layouts = Vec::with_capacity(params.len());
        for (name, param) in &params {
            layouts.push(layouts_of(rank, plan, (name, param), precision, &mut used)?);
        }
        let mut states: HashMap<String, Vec<(Axis, State)>> = HashMap::with_capacity(points.len());
        for name in &points {
            states.insert(name.clone(), plan.states(Subject::Point, (name, None), rank.mesh(), &mut used));
        }
        let names: Vec<&str> = params.iter().map(|(name, _)| name.as_str()).collect();
        let point_names: Vec<&str> = points.iter().map(String::as_str).collect();
        plan.check_used(&used, &names, &point_names)?;
        for ((name, param), layouts) in params.iter().zip(layouts) {
            param.place(name, next_key(rank), layouts)?;
        }
        walk(&module, &mut |path, leaf| {
            if let Leaf::Point(point) = leaf {
                point.place(path, states.remove(path).unwrap_or_default());
            }
        });
        let params = params.into_iter().map(|(_, param)| param).collect();
        Ok(Model { module, rank: rank.clone(), precision, params })
    }

    /// The rank whose part of the model this is.
    #[must_use]
    pub fn rank(&self) -> &Rank {
        &self.rank
    }

    /// The dtype of computing.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.precision.dtype
    }

    /// The dtypes of computing and of the stored parameters.
    #[must_use]
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// A tape that records; one for each training step. Dropout lets everything pass on it until [`Tape::set_noise`] says which
    /// random numbers are drawn.
    #[must_use]
    pub fn tape(&self) -> Tape {
        Tape::new(&self.rank)
    }

    /// A tape that records nothing: for inference and validation.
    #[must_use]
    pub fn inference(&self) -> Tape {
        Tape::inference(&self.rank)
    }

    /// The parameters in the order of traversal, shared ones once.
    #[must_use]
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// The global number of parameter elements.
    #[must_use]
    pub fn num_params(&self) -> usize {
        self.params.iter().map(Param::numel).sum()
    }

    /// The parameter of a dotted name.
    ///
    /// # Errors
    /// `Kind::Config` with the nearest names.
    pub fn param(&self, name: &str) -> Result<&Param> {
        self.params.iter().find(|p| p.name() == name).ok_or_else(|| self.no_such(name))
    }

    /// Takes parameters out of training by a pattern over their names; gives their number.
    ///
    /// # Errors
    /// `Kind::Config` with the nearest names if there are none.
    pub fn freeze(&self, pattern: &str) -> Result<usize> {
        let found: Vec<&Param> = self.params.iter().filter(|p| matches(pattern, &p.name())).collect();
        found.iter().for_each(|p| p.set_frozen(true));
        if found.is_empty() { Err(self.no_such(pattern)) } else { Ok(found.len()) }
    }

    fn no_such(&self, pattern: &str) -> Error {
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

/// Parameters with their paths.
type NamedParams = Vec<(String, Param)>;

/// Parameters (shared ones under their first name) and names of points, in the order of traversal.
fn leaves(module: &dyn Module) -> Result<(NamedParams, Vec<String>)> {
    let mut params = NamedParams::new();
    let mut points = Vec::new();
    walk(module, &mut |path, leaf| match leaf {
        Leaf::Param(param) if !params.iter().any(|(_, p)| p.same_as(param)) => {
            params.push((path.to_string(), param.clone()));
        }
        Leaf::Param(_) => {}
        Leaf::Point(_) => points.push(path.to_string()),
    });
    let mut seen = HashSet::new();
    let names = params.iter().map(|(name, _)| name).chain(&points);
    if let Some(twice) = names.into_iter().find(|name| !seen.insert(name.as_str())) {
        let error =
            Error::new(Kind::Config, format!("two parameters or points of the model are called `{twice}`"));
        return Err(error.detail("help", "give each child another name in Module::children"));
    }
    Ok((params, points))
}

/// How a parameter is stored, and how it is computed with where that differs.
fn layouts_of(
    rank: &Rank,
    plan: &Plan,
    (name, param): (&str, &Param),
    precision: Precision,
    used: &mut [bool],
) -> Result<(Layout, Option<Layout>)> {
    let mut states = |subject| plan.states(subject, (name, Some(param.shape())), rank.mesh(), used);
    let (store, compute) = (states(Subject::Store), states(Subject::Compute));
    let plain = Layout::invariant(rank.mesh(), precision.param_dtype, param.shape());
    let make = || {
        let stored = with_states(&plain, &store)?;
        let computed = with_states(&stored.with_dtype(precision.dtype), &compute)?;
        // A rank without a part has nothing to compute with; what it stores is no matter.
        param.check_parts(&computed)?;
        Ok((stored, computed))
    };
    let place = |e: Error| e.detail("parameter", format!("{name} {:?}", param.shape()));
    let (stored, computed) = make().map_err(place)?;
    let computed = (computed != stored).then_some(computed);
    Ok((stored, computed))
}

fn next_key(rank: &Rank) -> Key {
    let keys = rank.extension::<Keys>();
    keys.0.replace(keys.0.get() + 1)
}
