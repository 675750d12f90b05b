//! Layout inference (sharding propagation): from the layouts of the arguments to the implicit redistributions and the
//! layouts of the outputs.
//!
//! After the labels are unified, each mesh axis is treated alone. An axis that shards a label: arguments with the label
//! take their shard of it, the other arguments reduce a partial sum and, if differentiable, become `~`; outputs with the
//! label are sharded, outputs without it are partial sums. An axis that shards nothing: partial sums stay partial if
//! they are exactly one group in which the op is linear, else they are reduced; the output is `=` if every
//! differentiable argument is, else the other arguments are relabelled `~` and so is the output.

use crate::layout::dim::Dim;
use crate::layout::lineage::Lineage;
use crate::layout::placement::Placement;
use crate::layout::refusal::Refusal;
use crate::layout::signature::{Labels, Signature};
use crate::layout::unify::Unification;
use crate::layout::{BEYOND_MEMORY, Layout};
use shardgrad_dist::{Axis, AxisSet, Mesh};
use shardgrad_kernels::{DType, Strides};
use smallvec::SmallVec;
use std::any::Any;
use std::cell::{OnceCell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// What an op declares for layout inference.
#[derive(Clone, Copy, Debug)]
pub struct Rule<'a> {
    /// The index signature: which dims of which tensors are the same index.
    pub signature: &'a Signature,
    /// Groups of arguments in which the op is jointly linear, the other arguments held fixed.
    pub linear_in: &'a [&'a [usize]],
    /// For each argument, whether it has a cotangent; missing entries count as `true`. Arguments that are not floats
    /// never have one.
    pub differentiable: &'a [bool],
}

impl Rule<'_> {
    fn is_differentiable(&self, i: usize, layout: &Layout) -> bool {
        layout.dtype().is_float() && self.differentiable.get(i).copied().unwrap_or(true)
    }
}

/// One implicit redistribution step of an argument along one mesh axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImplicitStep {
    /// The argument.
    pub arg: usize,
    /// The mesh axis.
    pub axis: Axis,
    /// The placement after the step.
    pub to: Placement,
}

/// The result of layout inference for one op on some layouts.
#[doc(alias = "sharding_propagation")]
#[doc(alias = "OutputSharding")]
#[derive(Clone, Debug)]
pub struct Inference {
    /// The implicit steps, in the order in which the rule finds them.
    pub steps: SmallVec<[ImplicitStep; 4]>,
    /// For each argument, its layout after the implicit steps; `None` where it does not change.
    pub targets: SmallVec<[Option<Layout>; 2]>,
    /// The layouts of the outputs.
    pub outputs: SmallVec<[Layout; 1]>,
    labels: Option<(Arc<Labels>, SmallVec<[Dim; 8]>)>,
    /// What follows from the layouts of the arguments.
    resolved: OnceCell<Resolved>,
    /// The row-major strides of the outputs in new memory of this rank.
    views: OnceCell<SmallVec<[Arc<Strides>; 1]>>,
    memoized: RefCell<Option<Memoized>>,
}

/// What each application of an op reads of its plan, computed once.
#[derive(Clone, Debug)]
struct Resolved {
    /// The layouts of the arguments after their steps.
    inputs: SmallVec<[Layout; 2]>,
    /// The lineage that the op adds to the outputs.
    lineage: Lineage,
    /// Whether an argument changes its layout.
    changes_inputs: bool,
}

/// A value that an op computed from the inference and the strides of its arguments, and those strides.
#[derive(Clone, Debug)]
struct Memoized {
    views: SmallVec<[Arc<Strides>; 2]>,
    what: Rc<dyn Any>,
}

impl Inference {
    /// Makes the result for an op that states its own rule, takes no implicit step and reads no label.
    #[must_use]
    pub fn direct(num_args: usize, outputs: impl IntoIterator<Item = Layout>) -> Inference {
        Inference {
            steps: SmallVec::new(),
            targets: SmallVec::from_elem(None, num_args),
            outputs: outputs.into_iter().collect(),
            labels: None,
            resolved: OnceCell::new(),
            views: OnceCell::new(),
            memoized: RefCell::default(),
        }
    }

    /// Adds an implicit step of argument `i`; `layout` is the layout of the argument before its first step.
    #[must_use]
    pub fn step(mut self, i: usize, layout: &Layout, axis: Axis, placement: Placement) -> Inference {
        self.push(i, layout, axis, placement, None);
        self
    }

    /// Returns the same inference with other layouts after the steps, for an op whose rule changes what its signature gives.
    pub(crate) fn with_layouts(
        &self,
        targets: SmallVec<[Option<Layout>; 2]>,
        outputs: SmallVec<[Layout; 1]>,
    ) -> Inference {
        let (steps, labels) = (self.steps.clone(), self.labels.clone());
        Inference { steps, targets, labels, ..Inference::direct(0, outputs) }
    }

    /// Returns the same inference for [`Op::adjust_inference`](crate::op::Op::adjust_inference), without what applications of an op have
    /// computed from it.
    pub(crate) fn into_adjustable(self: Rc<Self>) -> Inference {
        let Inference { steps, targets, outputs, labels, .. } = Rc::unwrap_or_clone(self);
        Inference { steps, targets, labels, ..Inference::direct(0, outputs) }
    }

    /// Returns the global extent of a label and the range of it that the rank at a coordinate holds.
    ///
    /// # Panics
    /// If the signature has no such label: a bug in the op, which belongs to the library.
    #[must_use]
    pub fn label(&self, name: &str, mesh: &Mesh, coordinate: &[usize]) -> (usize, Range<usize>) {
        let dim = self
            .label_dim(name)
            .unwrap_or_else(|| panic!("bug in shardgrad: no label `{name}` in the signature"));
        (dim.extent, dim.range(mesh, coordinate))
    }

    /// Stores the layouts of the arguments after their steps.
    pub(crate) fn set_input_layouts(&self, args: &[&Layout]) {
        self.resolved.get_or_init(|| {
            let after = |(arg, target): (&&Layout, &Option<Layout>)| target.as_ref().unwrap_or(arg).clone();
            let inputs = args.iter().zip(&self.targets).map(after).collect();
            let changes_inputs = self.targets.iter().any(Option::is_some);
            Resolved { inputs, lineage: Lineage::of_new(args, &self.outputs), changes_inputs }
        });
    }

    /// Returns the layouts of the arguments after their steps.
    ///
    /// # Panics
    /// If this inference was not made by [`plan`](crate::op::plan).
    #[must_use]
    pub fn inputs(&self) -> &[Layout] {
        &self.resolved().inputs
    }

    /// Whether an argument changes its layout before the op runs.
    ///
    /// # Panics
    /// As [`Inference::inputs`].
    #[must_use]
    pub fn changes_inputs(&self) -> bool {
        self.resolved().changes_inputs
    }

    /// Returns the lineage that the op adds to that of the arguments.
    ///
    /// # Panics
    /// As [`Inference::inputs`].
    pub(crate) fn lineage(&self) -> Lineage {
        self.resolved().lineage
    }

    fn resolved(&self) -> &Resolved {
        self.resolved.get().expect("bug in shardgrad: an inference that no plan has stored")
    }

    /// Returns the strides of output `i` in new memory of this rank: row-major.
    pub(crate) fn view(&self, i: usize, coordinate: &[usize]) -> &Arc<Strides> {
        let view = |layout: &Layout| Strides::contiguous(&layout.local_shape(coordinate)).into();
        &self.views.get_or_init(|| self.outputs.iter().map(view).collect())[i]
    }

    /// Returns what `make` computes from this inference and the strides of the arguments; the last result is reused
    /// while the strides stay the same.
    pub(crate) fn memoize<'a, T: 'static>(
        &self,
        views: impl Iterator<Item = &'a Arc<Strides>> + Clone,
        make: impl FnOnce() -> T,
    ) -> Rc<T> {
        if let Some(memoized) = &*self.memoized.borrow()
            && memoized.views.iter().eq(views.clone())
            && let Ok(what) = memoized.what.clone().downcast()
        {
            return what;
        }
        let what = Rc::new(make());
        *self.memoized.borrow_mut() = Some(Memoized { views: views.cloned().collect(), what: what.clone() });
        what
    }

    /// Whether another inference has the same steps, targets and outputs.
    pub(crate) fn is_equivalent_to(&self, other: &Inference) -> bool {
        (&self.steps, &self.targets, &self.outputs) == (&other.steps, &other.targets, &other.outputs)
    }

    /// Returns the numbers of the labels of all dims.
    ///
    /// # Panics
    /// If the op states its own rule and has no labels: a bug in the op, which belongs to the library.
    #[must_use]
    pub fn labels(&self) -> &Labels {
        let (labels, _) = self.labels.as_ref().expect("bug in shardgrad: inferred without a signature");
        labels
    }

    /// Returns extent, grain and axes of a label.
    #[must_use]
    pub fn label_dim(&self, name: &str) -> Option<Dim> {
        let (labels, dims) = self.labels.as_ref()?;
        labels.number(name).map(|x| dims[x as usize])
    }

    fn push(&mut self, i: usize, layout: &Layout, axis: Axis, placement: Placement, grain: Option<usize>) {
        self.steps.push(ImplicitStep { arg: i, axis, to: placement });
        let target = self.targets[i].get_or_insert_with(|| layout.clone());
        if let (Placement::Shard(d), Some(grain)) = (placement, grain) {
            // The dim has the grain of the label from here on; the shard boundaries so far are the same in
            // both grains.
            target.set_grain(d, grain);
        }
        target.set_placement(axis, placement);
    }
}

/// Infers the implicit steps and the output layouts of an op. `out_dtypes` has one dtype for each output; `want` may
/// give, for each output, the layout that the gradient must have: it decides the extent and sharding of labels that no
/// argument has.
///
/// # Errors
/// A [`Refusal`] with code `mesh`, `shape`, `one`, `order`, `grain`, `conflict` or `whole`.
#[doc(alias = "sharding_propagation")]
pub fn infer(
    rule: &Rule<'_>,
    args: &[&Layout],
    out_dtypes: &[DType],
    want: &[Option<&Layout>],
) -> Result<Inference, Refusal> {
    let unified = Unification::new(rule.signature, args, want)?;
    let mesh = args[0].mesh();
    let mut rule_run = AxisRule {
        rule,
        args,
        result: Inference::direct(args.len(), []),
        partial: SmallVec::from_elem(AxisSet::EMPTY, unified.labels.outputs().len()),
        replicate: SmallVec::from_elem(AxisSet::EMPTY, unified.labels.outputs().len()),
        unified: &unified,
    };
    for (label, axis) in unified.sharded_axes() {
        rule_run.infer_label_axis(axis, label);
    }
    for axis in mesh.axes().filter(|a| mesh.size(*a) > 1 && unified.owner(*a).is_none()) {
        rule_run.infer_free_axis(axis);
    }
    let AxisRule { mut result, partial, replicate, .. } = rule_run;
    let (num_dtypes, num_outputs) = (out_dtypes.len(), unified.labels.outputs().len());
    if num_dtypes != num_outputs {
        let text = format!("{num_dtypes} dtype(s) for {num_outputs} output(s) of `{}`", rule.signature);
        return Err(Refusal::new("shape", text, &[])
            .hint("return one dtype for each output from Op::dtypes, saved outputs included"));
    }
    for (k, (dim_labels, &dtype)) in unified.labels.outputs().iter().zip(out_dtypes).enumerate() {
        let dims = dim_labels.iter().map(|&x| unified.dim(x)).collect();
        // Without a gradient `~` and `=` are the same.
        let replicate = if dtype.is_float() { replicate[k] } else { AxisSet::EMPTY };
        if let Some(axis) = partial[k].iter().next().filter(|_| dtype == DType::Bool) {
            let text = format!("a bool output would be a partial sum over axis `{}`", mesh.name(axis));
            return Err(Refusal::new("whole", text, &[]).hint("gather the sharded dim, or cast to u8"));
        }
        let output = Layout::assemble(mesh, dtype, dims, partial[k], replicate);
        if !output.is_addressable() {
            return Err(Refusal::new("shape", format!("the result {output} {BEYOND_MEMORY}"), &[])
                .hint("extents are counted in elements: make the largest one smaller"));
        }
        // Reuse the handle of an equal layout: equal handles compare by address.
        let same = args.iter().chain(want.iter().flatten()).find(|l| ***l == output);
        result.outputs.push(same.map_or(output, |l| (*l).clone()));
    }
    result.labels = Some(unified.into_labels());
    Ok(result)
}

struct AxisRule<'a> {
    rule: &'a Rule<'a>,
    args: &'a [&'a Layout],
    unified: &'a Unification,
    result: Inference,
    /// For each output, its partial axes.
    partial: SmallVec<[AxisSet; 2]>,
    /// For each output, its replicated axes.
    replicate: SmallVec<[AxisSet; 2]>,
}

impl AxisRule<'_> {
    fn step(&mut self, i: usize, axis: Axis, placement: Placement) {
        let grain = match placement {
            Placement::Shard(d) => Some(self.unified.dim(self.unified.labels.inputs()[i][d]).grain),
            _ => None,
        };
        self.result.push(i, self.args[i], axis, placement, grain);
    }

    /// Handles an axis that shards a label.
    fn infer_label_axis(&mut self, axis: Axis, label: u8) {
        for (i, layout) in self.args.iter().enumerate() {
            if let Some(d) = self.unified.labels.inputs()[i].iter().position(|x| *x == label) {
                if !layout.dims()[d].axes.contains(axis) {
                    self.step(i, axis, Placement::Shard(d));
                }
                continue;
            }
            if layout.partial().contains(axis) {
                self.step(i, axis, Placement::Invariant);
            }
            if self.rule.is_differentiable(i, layout) && !layout.replicate().contains(axis) {
                self.step(i, axis, Placement::Replicate);
            }
        }
        for (k, dim_labels) in self.unified.labels.outputs().iter().enumerate() {
            if !dim_labels.contains(&label) {
                self.partial[k] = self.partial[k].with(axis);
            }
        }
    }

    /// Handles an axis that shards no label of an argument.
    fn infer_free_axis(&mut self, axis: Axis) {
        let pending: SmallVec<[usize; 4]> =
            (0..self.args.len()).filter(|i| self.args[*i].partial().contains(axis)).collect();
        let created = self.unified.wanted.contains(axis);
        let is_group =
            |group: &&[usize]| group.len() == pending.len() && pending.iter().all(|i| group.contains(i));
        let stays = !pending.is_empty() && !created && self.rule.linear_in.iter().any(is_group);
        if !stays {
            for &i in &pending {
                self.step(i, axis, Placement::Invariant);
            }
        }
        let grads: SmallVec<[usize; 4]> =
            (0..self.args.len()).filter(|i| self.rule.is_differentiable(*i, self.args[*i])).collect();
        let replicated = |i: &usize| self.args[*i].replicate().contains(axis);
        if !stays && !created && !grads.iter().any(replicated) {
            return;
        }
        for &i in grads.iter().filter(|i| !(replicated(i) || stays && pending.contains(i))) {
            self.step(i, axis, Placement::Replicate);
        }
        for (k, dim_labels) in self.unified.labels.outputs().iter().enumerate() {
            let splits = created && dim_labels.iter().any(|&x| self.unified.dim(x).axes.contains(axis));
            if stays {
                self.partial[k] = self.partial[k].with(axis);
            } else if !splits {
                self.replicate[k] = self.replicate[k].with(axis);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(signature: &str, linear: &[&[usize]], mesh: &Mesh, args: &[&str]) -> Result<Inference, Refusal> {
        let layouts: Vec<Layout> = args.iter().map(|t| Layout::parse(t, mesh).unwrap()).collect();
        let args: Vec<&Layout> = layouts.iter().collect();
        let signature = Signature::parse(signature).unwrap();
        let dtypes = vec![DType::F32; signature.num_outputs()];
        infer(&Rule { signature: &signature, linear_in: linear, differentiable: &[] }, &args, &dtypes, &[])
    }

    const MATMUL: &str = "..m k, k n -> ..m n";
    const BY_ONE: &[&[usize]] = &[&[0], &[1]];

    #[test]
    fn row_parallel_matmul_gives_a_partial_sum() {
        let mesh = Mesh::new(&[("dp", 2), ("tp", 2)]).unwrap();
        let got = run(MATMUL, BY_ONE, &mesh, &["f32[8@dp, 4, 6@tp]", "f32[6@tp, 5]"]).unwrap();
        assert_eq!(got.outputs[0].to_string(), "f32[8@dp, 4, 5] +tp");
        assert_eq!(got.steps.as_slice(), [ImplicitStep { arg: 1, axis: Axis(0), to: Placement::Replicate }]);
        assert_eq!(got.targets[1].as_ref().unwrap().to_string(), "f32[6@tp, 5] ~dp");
        assert_eq!(got.label("k", &mesh, &[0, 1]), (6, 3..6));
        assert_eq!(got.label("m1", &mesh, &[1, 1]), (4, 0..4));
    }

    #[test]
    fn output_with_the_layout_of_an_argument_shares_its_handle() {
        let layouts = ["f32[8, 4]", "f32[8, 4]"].map(|t| Layout::parse(t, &Mesh::single()).unwrap());
        let args: Vec<&Layout> = layouts.iter().collect();
        let signature = Signature::parse("..m, ..m -> ..m").unwrap();
        let rule = Rule { signature: &signature, linear_in: &[], differentiable: &[] };
        let got = infer(&rule, &args, &[DType::F32], &[]).unwrap();
        assert_eq!(got.outputs[0].address(), args[0].address());
        let got = infer(&rule, &args, &[DType::F64], &[]).unwrap();
        assert_eq!(got.outputs[0].to_string(), "f64[8, 4]");
    }

    #[test]
    fn mismatched_extents_name_both_arguments() {
        let refusal = run(MATMUL, BY_ONE, &Mesh::single(), &["f32[8, 4096]", "f32[1024, 512]"]).unwrap_err();
        assert_eq!(refusal.code, "shape");
        assert_eq!(
            refusal.message,
            "label `k` has extent 4096 in argument 0 (dim 1) but 1024 in argument 1 (dim 0)"
        );
        assert_eq!(refusal.positions, [(0, 1), (1, 0)]);
    }

    #[test]
    fn implicit_shard_takes_the_grain_of_the_label() {
        let mesh = Mesh::new(&[("a", 2)]).unwrap();
        let got = run("..m, ..m -> ..m", &[&[0, 1]], &mesh, &["f32[12:4@a]", "f32[12]"]).unwrap();
        assert_eq!(got.targets[1].as_ref().unwrap().to_string(), "f32[12:4@a]");
        assert_eq!(got.outputs[0].to_string(), "f32[12:4@a]");
        let got = run("..m, ..m -> ..m", &[&[0, 1]], &mesh, &["f32[12:4]", "f32[12:6]"]).unwrap();
        assert_eq!(got.outputs[0].to_string(), "f32[12:12]");
    }

    #[test]
    fn grains_are_compared_by_shard_boundaries() {
        let mesh = Mesh::new(&[("a", 2), ("b", 2)]).unwrap();
        let add = |x: &str, y: &str| run("..m, ..m -> ..m", &[&[0, 1]], &mesh, &[x, y]);
        assert_eq!(add("f32[12:4@a]", "f32[12@a]").unwrap_err().code, "grain");
        assert_eq!(add("f32[16:4@a]", "f32[16@a]").unwrap().outputs[0].to_string(), "f32[16:4@a]");
        assert_eq!(
            add("f32[12@a@b]", "f32[12:6@a]").unwrap().targets[1].as_ref().unwrap().to_string(),
            "f32[12@a@b]"
        );
        let refusal = add("f32[12:4@a]", "f32[12@a@b]").unwrap_err();
        assert!(refusal.hint.unwrap().contains("declare one grain"));
    }

    #[test]
    fn integers_are_never_replicated() {
        let mesh = Mesh::new(&[("a", 2)]).unwrap();
        let signature = Signature::parse("..m d! -> ..m").unwrap();
        let x = Layout::parse("f32[4, 6] ~a", &mesh).unwrap();
        let rule = Rule { signature: &signature, linear_in: &[], differentiable: &[true] };
        let got = infer(&rule, &[&x], &[DType::I64], &[]).unwrap();
        assert_eq!(got.outputs[0].to_string(), "i64[4]");
        let ids = Layout::parse("i64[4, 6]", &mesh).unwrap();
        let mask =
            Rule { differentiable: &[], signature: &Signature::parse("..m, ..m -> ..m").unwrap(), ..rule };
        assert!(infer(&mask, &[&x, &ids], &[DType::F32], &[]).unwrap().steps.is_empty());
    }

    #[test]
    fn created_labels_need_a_wanted_layout_and_a_free_axis() {
        let mesh = Mesh::new(&[("a", 2)]).unwrap();
        let signature = Signature::parse("..m -> ..m d").unwrap();
        let rule = Rule { signature: &signature, linear_in: &[&[0]], differentiable: &[] };
        let x = Layout::parse("f32[4@a]", &mesh).unwrap();
        let go = |want: &str| {
            let want = Layout::parse(want, &mesh).unwrap();
            infer(&rule, &[&x], &[DType::F32], &[Some(&want)])
                .map(|i| i.outputs[0].to_string())
                .map_err(|r| r.code)
        };
        assert_eq!(go("f32[4, 6]").unwrap(), "f32[4@a, 6]");
        assert_eq!(go("f32[4, 6@a]").unwrap_err(), "conflict");
        assert_eq!(go("f32[5, 6]").unwrap_err(), "shape");
        assert_eq!(infer(&rule, &[&x], &[DType::F32], &[]).unwrap_err().code, "shape");
    }

    #[test]
    fn arguments_on_two_meshes_are_refused() {
        let (one, two) = (Mesh::single(), Mesh::new(&[("a", 2)]).unwrap());
        let signature = Signature::parse("..m, ..m -> ..m").unwrap();
        let rule = Rule { signature: &signature, linear_in: &[], differentiable: &[] };
        let (x, y) = (Layout::invariant(&one, DType::F32, &[4]), Layout::invariant(&two, DType::F32, &[4]));
        assert_eq!(infer(&rule, &[&x, &y], &[DType::F32], &[]).unwrap_err().code, "mesh");
    }

    #[test]
    fn results_beyond_the_address_space_are_refused() {
        use crate::methods::indexing::Indexing;
        use crate::methods::shaping::Shaping;
        use crate::methods::value::Value;
        use crate::tensor::Tensor;
        use shardgrad_dist::{Kind, World};
        const HUGE: usize = 1 << 62;
        type Call = fn(&Tensor) -> Tensor;
        let cases: [(&str, Call); 7] = [
            ("expand", |x| x.expand(0, HUGE)),
            ("expand", |x| x.expand(0, usize::MAX)),
            ("one_hot", |x| x.one_hot(HUGE, DType::F32)),
            ("pad", |x| x.pad(0, usize::MAX, 1)),
            ("pad", |x| x.slice(0, 0..0).pad(0, HUGE, HUGE)),
            ("diag_embed", |x| x.diag_embed(isize::MIN)),
            ("mul", |x| {
                let row = x.slice(0, 0..1).cast(DType::F32).expand(0, 1 << 40).reshape(&[1 << 40]);
                row.unsqueeze(1).mul(&row)
            }),
        ];
        for (name, case) in cases {
            let made = World::run(Mesh::single(), |rank| {
                Ok(case(&Tensor::from_host(rank, &[2], &[0i64, 1])?).layout().to_string())
            });
            let error = made.unwrap_err();
            assert_eq!(error.kind(), Kind::Shape, "{name}: {error}");
            assert!(error.message().starts_with(&format!("{name}: the result ")), "{error}");
            assert!(error.message().ends_with("has more elements than memory can address"), "{error}");
            assert!(error.site().is_some_and(|s| s.file().ends_with("infer.rs")), "{error}");
        }
    }
}
