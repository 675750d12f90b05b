//! The layout rule of every op: from the layouts of the arguments to the implied steps and the layouts of the outputs.
//!
//! After the labels are joined each axis is treated alone. An axis that splits a label: arguments
//! with the label take their shard of it, the others complete a pending sum and, if differentiable, become `~`;
//! outputs with the label are split, those without hold a pending sum. An axis that splits nothing: pending sums
//! stay pending if they are exactly one group in which the op is linear, else they are completed; the output is `=`
//! if every differentiable argument is, else the others are cast to `~` and so is the output.

use crate::dim::Dim;
use crate::join::Join;
use crate::layout::{BEYOND_MEMORY, Layout};
use crate::lineage::Lineage;
use crate::refusal::Refusal;
use crate::signature::{Labels, Signature};
use crate::state::State;
use shardgrad_dist::{Axis, AxisSet, Mesh};
use shardgrad_kernels::{DType, Strides};
use smallvec::SmallVec;
use std::any::Any;
use std::cell::{OnceCell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// What an op declares of itself.
#[derive(Clone, Copy, Debug)]
pub struct Rule<'a> {
    /// Which dims of which tensors are the same thing.
    pub signature: &'a Signature,
    /// Groups of arguments in which the op is linear jointly, the others held fixed.
    pub linear_in: &'a [&'a [usize]],
    /// Per argument, whether it has a cotangent; shorter than the arguments means yes for the rest. Arguments that are
    /// no floats have none, whatever stands here.
    pub differentiable: &'a [bool],
}

impl Rule<'_> {
    fn is_differentiable(&self, i: usize, layout: &Layout) -> bool {
        layout.dtype().is_float() && self.differentiable.get(i).copied().unwrap_or(true)
    }
}

/// One implied step: the argument, the axis, and the state that it takes.
pub type Implied = (usize, Axis, State);

/// What an op does to some layouts.
#[derive(Clone, Debug)]
pub struct Inference {
    /// The implied steps, in the order in which the rule finds them.
    pub steps: SmallVec<[Implied; 4]>,
    /// Per argument its layout after its steps; `None` where it stays as it is.
    pub targets: SmallVec<[Option<Layout>; 2]>,
    /// The layouts of the outputs.
    pub outputs: SmallVec<[Layout; 1]>,
    labels: Option<(Arc<Labels>, SmallVec<[Dim; 8]>)>,
    /// The layouts of the arguments after their steps, and what outputs come from beside them.
    settled: OnceCell<(SmallVec<[Layout; 2]>, Lineage)>,
    /// How the outputs lie in new memory of the one rank that has inferred this.
    views: OnceCell<SmallVec<[Arc<Strides>; 1]>>,
    noted: RefCell<Option<Noted>>,
}

/// What an op has worked out, and how its arguments lay then.
#[derive(Clone, Debug)]
struct Noted {
    views: SmallVec<[Arc<Strides>; 2]>,
    what: Rc<dyn Any>,
}

impl Inference {
    /// The result for an op that states its own rule, takes no implied step and reads no label.
    #[must_use]
    pub fn direct(num_args: usize, outputs: impl IntoIterator<Item = Layout>) -> Inference {
        Inference {
            steps: SmallVec::new(),
            targets: SmallVec::from_elem(None, num_args),
            outputs: outputs.into_iter().collect(),
            labels: None,
            settled: OnceCell::new(),
            views: OnceCell::new(),
            noted: RefCell::default(),
        }
    }

    /// Adds an implied step of an argument that has the given layout before the first of its steps.
    #[must_use]
    pub fn step(mut self, i: usize, layout: &Layout, axis: Axis, state: State) -> Inference {
        self.push(i, layout, axis, state, None);
        self
    }

    /// The global extent of a label and the range of it that the rank at a coordinate holds.
    ///
    /// # Panics
    /// If the signature has no such label: ops are written by us, so that is a bug in the library.
    #[must_use]
    pub fn label(&self, name: &str, mesh: &Mesh, coordinate: &[usize]) -> (usize, Range<usize>) {
        let dim = self
            .label_dim(name)
            .unwrap_or_else(|| panic!("bug in shardgrad: no label `{name}` in the signature"));
        (dim.extent, dim.range(mesh, coordinate))
    }

    /// Notes what the arguments were before their steps.
    pub(crate) fn settle(&self, args: &[&Layout]) {
        self.settled.get_or_init(|| {
            let after = |(arg, target): (&&Layout, &Option<Layout>)| target.as_ref().unwrap_or(arg).clone();
            let inputs = args.iter().zip(&self.targets).map(after).collect();
            (inputs, Lineage::of_new(args, &self.outputs))
        });
    }

    /// The layouts of the arguments after their steps.
    ///
    /// # Panics
    /// If this comes from no [`plan`](crate::op::plan).
    #[must_use]
    pub fn inputs(&self) -> &[Layout] {
        &self.settled().0
    }

    /// What the outputs come from beside the arguments.
    ///
    /// # Panics
    /// As [`Inference::inputs`].
    pub(crate) fn lineage(&self) -> Lineage {
        self.settled().1
    }

    fn settled(&self) -> &(SmallVec<[Layout; 2]>, Lineage) {
        self.settled.get().expect("bug in shardgrad: an inference that no plan has made")
    }

    /// How output `i` lies in new memory of the rank that has inferred this: row-major.
    pub(crate) fn view(&self, i: usize, coordinate: &[usize]) -> &Arc<Strides> {
        let view = |layout: &Layout| Strides::contiguous(&layout.local_shape(coordinate)).into();
        &self.views.get_or_init(|| self.outputs.iter().map(view).collect())[i]
    }

    /// What `make` works out of this and of how the arguments lie: from memory, if they lay so the last time.
    pub(crate) fn noted<'a, T: 'static>(
        &self,
        views: impl Iterator<Item = &'a Arc<Strides>> + Clone,
        make: impl FnOnce() -> T,
    ) -> Rc<T> {
        if let Some(noted) = &*self.noted.borrow()
            && noted.views.iter().eq(views.clone())
            && let Ok(what) = noted.what.clone().downcast()
        {
            return what;
        }
        let what = Rc::new(make());
        *self.noted.borrow_mut() = Some(Noted { views: views.cloned().collect(), what: what.clone() });
        what
    }

    /// Whether another says the same of the same arguments.
    pub(crate) fn is_as(&self, other: &Inference) -> bool {
        (&self.steps, &self.targets, &self.outputs) == (&other.steps, &other.targets, &other.outputs)
    }

    /// The numbers of the labels of all dims.
    ///
    /// # Panics
    /// If the op states its own rule: ops are written by us, so that is a bug in the library.
    #[must_use]
    pub fn labels(&self) -> &Labels {
        let (labels, _) = self.labels.as_ref().expect("bug in shardgrad: inferred without a signature");
        labels
    }

    /// Extent, grain and axes of a label.
    #[must_use]
    pub fn label_dim(&self, name: &str) -> Option<Dim> {
        let (labels, dims) = self.labels.as_ref()?;
        labels.number(name).map(|x| dims[x as usize])
    }

    fn push(&mut self, i: usize, layout: &Layout, axis: Axis, state: State, grain: Option<usize>) {
        self.steps.push((i, axis, state));
        let target = self.targets[i].get_or_insert_with(|| layout.clone());
        if let (State::Shard(d), Some(grain)) = (state, grain) {
            // The label's grain holds from here on; the cuts so far are the same in both.
            target.set_grain(d, grain);
        }
        target.set_state(axis, state);
    }
}

/// The implied steps and the output layouts of an op. `out_dtypes` has one dtype per output; `want` may give, per
/// output, the layout that the gradient law asks for: it decides extent and split of labels that no argument has.
///
/// # Errors
/// A refusal: codes `mesh`, `shape`, `one`, `order`, `grain`, `conflict`, `whole`.
pub fn infer(
    rule: &Rule<'_>,
    args: &[&Layout],
    out_dtypes: &[DType],
    want: &[Option<&Layout>],
) -> Result<Inference, Refusal> {
    let join = Join::new(rule.signature, args, want)?;
    let mesh = args[0].mesh();
    let mut work = Work {
        rule,
        args,
        result: Inference::direct(args.len(), []),
        partial: SmallVec::from_elem(AxisSet::EMPTY, join.labels.outputs().len()),
        replicate: SmallVec::from_elem(AxisSet::EMPTY, join.labels.outputs().len()),
        join: &join,
    };
    for (label, axis) in join.split_axes() {
        work.axis_of_label(axis, label);
    }
    for axis in mesh.axes().filter(|a| mesh.size(*a) > 1 && join.owner(*a).is_none()) {
        work.axis_of_nothing(axis);
    }
    let Work { mut result, partial, replicate, .. } = work;
    let (num_dtypes, num_outputs) = (out_dtypes.len(), join.labels.outputs().len());
    if num_dtypes != num_outputs {
        let text = format!("{num_dtypes} dtype(s) for {num_outputs} output(s) of `{}`", rule.signature);
        return Err(Refusal::new("shape", text, &[])
            .hint("Op::dtypes gives one for each output, saved ones included"));
    }
    for (k, (places, &dtype)) in join.labels.outputs().iter().zip(out_dtypes).enumerate() {
        let dims = places.iter().map(|&x| join.dim(x)).collect();
        // Without a gradient there is nothing to tell `~` from `=`.
        let replicate = if dtype.is_float() { replicate[k] } else { AxisSet::EMPTY };
        if let Some(axis) = partial[k].iter().next().filter(|_| dtype == DType::Bool) {
            let text =
                format!("truth values would be pending over axis `{}`, and have no sum", mesh.name(axis));
            return Err(Refusal::new("whole", text, &[]).hint("gather the dim that is split, or cast to u8"));
        }
        let output = Layout::assemble(mesh, dtype, dims, partial[k], replicate);
        if !output.is_addressable() {
            return Err(Refusal::new("shape", format!("the result {output} {BEYOND_MEMORY}"), &[])
                .hint("extents are counted in elements; look for one that is too large"));
        }
        // Handles of one layout are equal at a glance.
        let same = args.iter().chain(want.iter().flatten()).find(|l| ***l == output);
        result.outputs.push(same.map_or(output, |l| (*l).clone()));
    }
    result.labels = Some(join.into_labels());
    Ok(result)
}

struct Work<'a> {
    rule: &'a Rule<'a>,
    args: &'a [&'a Layout],
    join: &'a Join,
    result: Inference,
    /// Per output its pending axes.
    partial: SmallVec<[AxisSet; 2]>,
    /// Per output its replicated axes.
    replicate: SmallVec<[AxisSet; 2]>,
}

impl Work<'_> {
    fn step(&mut self, i: usize, axis: Axis, state: State) {
        let grain = match state {
            State::Shard(d) => Some(self.join.dim(self.join.labels.inputs()[i][d]).grain),
            _ => None,
        };
        self.result.push(i, self.args[i], axis, state, grain);
    }

    /// An axis that splits a label.
    fn axis_of_label(&mut self, axis: Axis, label: u8) {
        for (i, layout) in self.args.iter().enumerate() {
            if let Some(d) = self.join.labels.inputs()[i].iter().position(|x| *x == label) {
                if !layout.dims()[d].axes.contains(axis) {
                    self.step(i, axis, State::Shard(d));
                }
                continue;
            }
            if layout.partial().contains(axis) {
                self.step(i, axis, State::Invariant);
            }
            if self.rule.is_differentiable(i, layout) && !layout.replicate().contains(axis) {
                self.step(i, axis, State::Replicate);
            }
        }
        for (k, places) in self.join.labels.outputs().iter().enumerate() {
            if !places.contains(&label) {
                self.partial[k] = self.partial[k].with(axis);
            }
        }
    }

    /// An axis that splits no label of an argument.
    fn axis_of_nothing(&mut self, axis: Axis) {
        let pending: SmallVec<[usize; 4]> =
            (0..self.args.len()).filter(|i| self.args[*i].partial().contains(axis)).collect();
        let created = self.join.wanted.contains(axis);
        let is_group =
            |group: &&[usize]| group.len() == pending.len() && pending.iter().all(|i| group.contains(i));
        let stays = !pending.is_empty() && !created && self.rule.linear_in.iter().any(is_group);
        if !stays {
            for &i in &pending {
                self.step(i, axis, State::Invariant);
            }
        }
        let grads: SmallVec<[usize; 4]> =
            (0..self.args.len()).filter(|i| self.rule.is_differentiable(*i, self.args[*i])).collect();
        let replicated = |i: &usize| self.args[*i].replicate().contains(axis);
        if !stays && !created && !grads.iter().any(replicated) {
            return;
        }
        for &i in grads.iter().filter(|i| !(replicated(i) || stays && pending.contains(i))) {
            self.step(i, axis, State::Replicate);
        }
        for (k, places) in self.join.labels.outputs().iter().enumerate() {
            let splits = created && places.iter().any(|&x| self.join.dim(x).axes.contains(axis));
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
    fn a_row_split_product_ends_in_a_pending_sum() {
        let mesh = Mesh::new(&[("dp", 2), ("tp", 2)]).unwrap();
        let got = run(MATMUL, BY_ONE, &mesh, &["f32[8@dp, 4, 6@tp]", "f32[6@tp, 5]"]).unwrap();
        assert_eq!(got.outputs[0].to_string(), "f32[8@dp, 4, 5] +tp");
        assert_eq!(got.steps.as_slice(), [(1, Axis(0), State::Replicate)]);
        assert_eq!(got.targets[1].as_ref().unwrap().to_string(), "f32[6@tp, 5] ~dp");
        assert_eq!(got.label("k", &mesh, &[0, 1]), (6, 3..6));
        assert_eq!(got.label("m1", &mesh, &[1, 1]), (4, 0..4));
    }

    #[test]
    fn an_output_that_lies_as_an_argument_shares_its_layout() {
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
    fn extents_that_differ_name_both_arguments() {
        let refusal = run(MATMUL, BY_ONE, &Mesh::single(), &["f32[8, 4096]", "f32[1024, 512]"]).unwrap_err();
        assert_eq!(refusal.code, "shape");
        assert_eq!(
            refusal.message,
            "label `k` has extent 4096 in argument 0 (dim 1) but 1024 in argument 1 (dim 0)"
        );
        assert_eq!(refusal.places, [(0, 1), (1, 0)]);
    }

    #[test]
    fn a_slice_takes_the_grain_of_the_label() {
        let mesh = Mesh::new(&[("a", 2)]).unwrap();
        let got = run("..m, ..m -> ..m", &[&[0, 1]], &mesh, &["f32[12:4@a]", "f32[12]"]).unwrap();
        assert_eq!(got.targets[1].as_ref().unwrap().to_string(), "f32[12:4@a]");
        assert_eq!(got.outputs[0].to_string(), "f32[12:4@a]");
        let got = run("..m, ..m -> ..m", &[&[0, 1]], &mesh, &["f32[12:4]", "f32[12:6]"]).unwrap();
        assert_eq!(got.outputs[0].to_string(), "f32[12:12]");
    }

    #[test]
    fn grains_are_compared_by_their_cuts() {
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
    fn integers_have_no_replicated_state() {
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
    fn created_labels_need_a_layout_and_cannot_take_an_axis_twice() {
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
    fn results_beyond_all_memory_are_refused() {
        use crate::indexing::Indexing;
        use crate::shaping::Shaping;
        use crate::tensor::Tensor;
        use crate::value::Value;
        use shardgrad_dist::{Kind, World};
        const HUGE: usize = 1 << 62;
        type Call = fn(&Tensor) -> Tensor;
        let cases: [(&str, Call); 7] = [
            ("expand", |x| x.expand(0, HUGE)),
            ("expand", |x| x.expand(0, usize::MAX)),
            ("one_hot", |x| x.one_hot(HUGE, DType::F32)),
            ("pad", |x| x.pad(0, usize::MAX, 1)),
            ("pad", |x| x.slice(0, 0..0).pad(0, HUGE, HUGE)),
            ("diagonal_of", |x| x.diagonal_of(isize::MIN)),
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
            assert!(error.message().ends_with("has more elements than memory has addresses"), "{error}");
            assert!(error.site().is_some_and(|s| s.file().ends_with("infer.rs")), "{error}");
        }
    }
}
