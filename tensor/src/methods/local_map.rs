//! `local_map`: runs a function of local tensors as an op with stated layouts (`shard_map` in JAX, `local_map` in
//! PyTorch DTensor).

#[cfg(test)]
mod tests;

use crate::execution::context::Context;
use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::layout::infer::Inference;
use crate::layout::refusal::Refusal;
use crate::methods::value::Value;
use crate::op::{Cotangents, DTypes, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp, unwind};
use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::DType;
use smallvec::SmallVec;
use std::fmt;
use std::rc::Rc;

/// The layouts of a local map. Nothing is derived, so all of them are stated.
#[doc(alias = "in_specs")]
#[doc(alias = "out_specs")]
#[doc(alias = "in_placements")]
#[doc(alias = "out_placements")]
#[derive(Clone, Copy, Debug)]
pub struct LocalMapLayouts<'a> {
    /// Of the arguments; an argument with another layout is refused.
    pub inputs: &'a [Layout],
    /// Of the results.
    pub outputs: &'a [Layout],
    /// Of the arguments' cotangents as the backward function returns them: the duals of `inputs`. An argument that
    /// each rank uses independently is `~`, and its cotangent a partial sum.
    pub cotangents: &'a [Layout],
}

/// Local results from local arguments.
pub type MapForward = dyn Fn(&Rank, &[LocalTensor]) -> Result<LocalTensors>;
/// Local cotangents of all arguments from the local arguments and the local cotangents of all results.
pub type MapBackward = dyn Fn(&Rank, &[LocalTensor], &[LocalTensor]) -> Result<LocalTensors>;

/// Applies a function of local tensors: `forward` gets this rank's local arguments and returns its local results;
/// `backward` gets the local arguments and the cotangents of the results and returns those of all arguments (for
/// integers any local tensor of their dtype and shape). The caller guarantees that the functions match the layouts. A
/// dry run does not call the functions, so their computation and communication are missing from its account: it has no
/// values that they could read.
///
/// ```
/// use shardgrad_tensor::{Layout, LocalMapLayouts, Mesh, LocalTensor, Rank, Result, Tensor, World, local_map};
///
/// // Squares, by numbers that are brought to the host and back; each rank does its own.
/// fn map(rank: &Rank, x: &LocalTensor, f: impl Fn(usize, f64) -> f64) -> Result<LocalTensor> {
///     let numbers = x.to_f64(rank)?.into_iter().enumerate().map(|(i, x)| f(i, x)).collect::<Vec<f64>>();
///     LocalTensor::upload(rank, &x.view.shape, &numbers)
/// }
/// let squares = World::run(Mesh::parse("a=2")?, |rank| {
///     let layout = [Layout::parse("f64[3@a]", rank.mesh())?];
///     let x = Tensor::from_global(rank, &layout[0], &[1.0, 2.0, 3.0])?;
///     let layouts = LocalMapLayouts { inputs: &layout, outputs: &layout, cotangents: &layout };
///     let forward = |rank: &Rank, x: &[LocalTensor]| Ok([map(rank, &x[0], |_, x| x * x)?].into_iter().collect());
///     let backward = |rank: &Rank, x: &[LocalTensor], dy: &[LocalTensor]| {
///         let dy = dy[0].to_f64(rank)?;
///         Ok([map(rank, &x[0], |i, x| 2.0 * x * dy[i])?].into_iter().collect())
///     };
///     local_map("squares", &[&x], layouts, forward, backward)[0].to_f64()
/// })?;
/// assert_eq!(squares[0], [1.0, 4.0, 9.0]);
/// # Ok::<(), shardgrad_tensor::Error>(())
/// ```
///
/// # Panics
/// Unwinds with `Kind::Layout` if an argument has another layout than stated, or a stated cotangent is not the dual of
/// its argument; with `Kind::Shape` if there is no argument, or a function returns a wrong number of local tensors, or
/// one without the dtype and local shape of its layout.
#[doc(alias = "shard_map")]
#[doc(alias = "custom_vjp")]
#[doc(alias = "autograd.Function")]
#[track_caller]
#[must_use]
pub fn local_map<V: Value>(
    name: &'static str,
    inputs: &[&V],
    layouts: LocalMapLayouts<'_>,
    forward: impl Fn(&Rank, &[LocalTensor]) -> Result<LocalTensors> + 'static,
    backward: impl Fn(&Rank, &[LocalTensor], &[LocalTensor]) -> Result<LocalTensors> + 'static,
) -> SmallVec<[V; 2]> {
    unwind(check(name, inputs.len(), layouts));
    V::apply(Rc::new(LocalMap::new(name, layouts, forward, backward)), inputs)
}

/// The maximum number of arguments.
const INPUTS_MAX: usize = 6;

fn check(name: &str, count: usize, layouts: LocalMapLayouts<'_>) -> Result<()> {
    let LocalMapLayouts { inputs, cotangents, .. } = layouts;
    if count == 0 {
        let text = format!("local_map {name}: needs at least one argument");
        return Err(Error::new(Kind::Shape, text)
            .detail("help", "to make a tensor without arguments use Tensor::from_local"));
    }
    let refuse = |text: String| Err(Error::new(Kind::Layout, format!("local_map {name}: {text}")));
    if count != inputs.len() || count != cotangents.len() || count > INPUTS_MAX {
        let (i, c) = (inputs.len(), cotangents.len());
        return refuse(format!(
            "{count} arguments (at most {INPUTS_MAX}), but {i} layouts and {c} cotangent layouts"
        ));
    }
    for (i, (input, cotangent)) in inputs.iter().zip(cotangents).enumerate() {
        if input.dtype().is_float() && *cotangent != input.dual() {
            let dual = input.dual();
            return refuse(format!(
                "argument {i} is {input}, whose cotangent must be {dual}, not {cotangent}"
            ))
            .map_err(|e| {
                e.detail("help", "for a partial cotangent make the argument replicated (~) on that axis")
            });
        }
    }
    Ok(())
}

/// The stated results of a user function.
struct StatedOutputs {
    map: &'static str,
    /// Which function of the map: `forward` or `backward`.
    function: &'static str,
    layouts: Vec<Layout>,
}

impl StatedOutputs {
    fn dtypes(&self) -> DTypes {
        self.layouts.iter().map(Layout::dtype).collect()
    }

    /// The inference of an op with these results: the arguments stay as they are.
    fn inference(&self, num_inputs: usize) -> Rc<Inference> {
        Rc::new(Inference::direct(num_inputs, self.layouts.iter().cloned()))
    }

    /// Calls the user function and checks its results; in a dry run returns local tensors without values instead.
    fn run(&self, rank: &Rank, function: impl FnOnce() -> Result<LocalTensors>) -> Result<LocalTensors> {
        if rank.is_dry_run() {
            let empty = |l: &Layout| LocalTensor::alloc(rank, l.dtype(), &l.local_shape(rank.coordinates()));
            return self.layouts.iter().map(empty).collect();
        }
        let outputs = function()?;
        self.check(&outputs, rank)?;
        Ok(outputs)
    }

    /// Checks that the user function returned the stated local tensors, since later ops trust their layouts.
    fn check(&self, outputs: &LocalTensors, rank: &Rank) -> Result<()> {
        let StatedOutputs { map, function, layouts } = self;
        let refuse = |text: String| {
            let text = format!("local_map {map}: the {function} function returned {text}");
            Err(Error::new(Kind::Shape, text).detail(
                "help",
                "return a local tensor for each layout, with its dtype and its local_shape(rank.coordinates())",
            ))
        };
        if outputs.len() != layouts.len() {
            return refuse(format!("{} local tensors for {} layouts", outputs.len(), layouts.len()));
        }
        for (i, (output, layout)) in outputs.iter().zip(layouts).enumerate() {
            let local = layout.local_shape(rank.coordinates());
            if (output.dtype, &output.view.shape) != (layout.dtype(), &local) {
                let [given, right] = [(output.dtype, &output.view.shape), (layout.dtype(), &local)]
                    .map(|(dtype, shape)| format!("{dtype}{:?}", shape.as_slice()));
                return refuse(format!("{given} as local tensor {i}; of {layout} this rank holds {right}"));
            }
        }
        Ok(())
    }
}

/// A signature with its own label for each dim of each tensor: no two dims need be the same index.
fn signature(inputs: &[Layout], outputs: &[Layout]) -> String {
    let mut next = 0;
    let mut side = |layouts: &[Layout]| {
        let tensor = |l: &Layout| {
            next += l.ndim();
            (next - l.ndim()..next).map(|d| format!("x{d}")).collect::<Vec<_>>().join(" ")
        };
        layouts.iter().map(tensor).collect::<Vec<_>>().join(", ")
    };
    format!("{} -> {}", side(inputs), side(outputs))
}

/// Clones the handles of local tensors, for functions that may keep them.
fn clone_all(locals: &[&LocalTensor]) -> Vec<LocalTensor> {
    locals.iter().map(|p| (*p).clone()).collect()
}

struct LocalMap {
    signature: String,
    inputs: Vec<Layout>,
    outputs: StatedOutputs,
    forward: Box<MapForward>,
    backward: Rc<MapBackward>,
}

/// The backward op: its arguments are those of the forward, then the cotangents of the results.
struct LocalMapBackward {
    signature: String,
    num_inputs: usize,
    outputs: StatedOutputs,
    backward: Rc<MapBackward>,
}

impl LocalMap {
    fn new(
        name: &'static str,
        layouts: LocalMapLayouts<'_>,
        forward: impl Fn(&Rank, &[LocalTensor]) -> Result<LocalTensors> + 'static,
        backward: impl Fn(&Rank, &[LocalTensor], &[LocalTensor]) -> Result<LocalTensors> + 'static,
    ) -> LocalMap {
        LocalMap {
            signature: signature(layouts.inputs, layouts.outputs),
            inputs: layouts.inputs.to_vec(),
            outputs: StatedOutputs { map: name, function: "forward", layouts: layouts.outputs.to_vec() },
            forward: Box::new(forward),
            backward: Rc::new(backward),
        }
    }
}

impl fmt::Debug for LocalMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LocalMap({}, {:?} -> {:?})", self.outputs.map, self.inputs, self.outputs.layouts)
    }
}

impl fmt::Debug for LocalMapBackward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LocalMapBackward({}, {:?})", self.outputs.map, self.outputs.layouts)
    }
}

impl Op for LocalMap {
    fn name(&self) -> &'static str {
        self.outputs.map
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        const ALL: &[usize] = &[0, 1, 2, 3, 4, 5];
        SavedForBackward { inputs: ALL.split_at(self.inputs.len()).0, outputs: &[] }
    }

    fn dtypes(&self, _: &[DType], _: usize) -> Result<DTypes> {
        Ok(self.outputs.dtypes())
    }

    fn infer(
        &self,
        _: &Context,
        args: &[&Layout],
        _: &[DType],
        _: &[Option<Layout>],
    ) -> Result<Rc<Inference>, Refusal> {
        match args.iter().zip(&self.inputs).position(|(arg, stated)| *arg != stated) {
            None => Ok(self.outputs.inference(args.len())),
            Some(i) => {
                let text = format!("argument {i} is {}, but the map needs {}", args[i], self.inputs[i]);
                let hint = format!("redistribute argument {i} to {} first", self.inputs[i]);
                Err(Refusal::new("stated", text, &[(i, 0)]).hint(hint))
            }
        }
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        self.outputs.run(local.rank, || (self.forward)(local.rank, &clone_all(x)))
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let grads: Vec<Tensor> = (0..self.outputs.layouts.len()).map(|i| cx.grad(i)).collect();
        let saved = (0..self.inputs.len()).map(|i| cx.input(i));
        let args: Vec<&Tensor> = saved.chain(&grads).collect();
        let layouts: Vec<Layout> = args.iter().map(|t| t.layout().clone()).collect();
        let duals: Vec<Layout> = self.inputs.iter().map(Layout::dual).collect();
        let op = LocalMapBackward {
            signature: signature(&layouts, &duals),
            num_inputs: self.inputs.len(),
            outputs: StatedOutputs { map: self.outputs.map, function: "backward", layouts: duals },
            backward: self.backward.clone(),
        };
        let cotangents = Tensor::apply(op, &args);
        cx.cotangents(|i| cotangents[i].clone())
    }
}

impl Op for LocalMapBackward {
    fn name(&self) -> &'static str {
        self.outputs.map
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn dtypes(&self, _: &[DType], _: usize) -> Result<DTypes> {
        Ok(self.outputs.dtypes())
    }

    fn infer(
        &self,
        _: &Context,
        args: &[&Layout],
        _: &[DType],
        _: &[Option<Layout>],
    ) -> Result<Rc<Inference>, Refusal> {
        Ok(self.outputs.inference(args.len()))
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let (inputs, grads) = x.split_at(self.num_inputs);
        self.outputs.run(local.rank, || (self.backward)(local.rank, &clone_all(inputs), &clone_all(grads)))
    }
}
