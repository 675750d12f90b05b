//! The escape hatch: a function of local pieces as an op, with all layouts stated.

use crate::context::Context;
use crate::infer::Inference;
use crate::layout::Layout;
use crate::op::{Cotangents, DTypes, Keeps, Local, Op, Pieces, Vjp, unwind};
use crate::piece::Piece;
use crate::refusal::Refusal;
use crate::tensor::Tensor;
use crate::value::Value;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::DType;
use smallvec::SmallVec;
use std::fmt;
use std::rc::Rc;

/// What a local map says of its tensors. Nothing is derived, so everything is stated.
#[derive(Clone, Copy, Debug)]
pub struct MapLayouts<'a> {
    /// Of the arguments; one that lies otherwise is refused.
    pub inputs: &'a [Layout],
    /// Of the results.
    pub outputs: &'a [Layout],
    /// Of the arguments' cotangents as the backward function leaves them. By the gradient law they are the duals of
    /// `inputs`: an argument of which each rank makes its own use is `~`, and its cotangent pending.
    pub cotangents: &'a [Layout],
}

/// Local results from local arguments.
pub type MapForward = dyn Fn(&Rank, &[Piece]) -> Result<Pieces>;
/// Local cotangents of all arguments from the local arguments and the local cotangents of all results.
pub type MapBackward = dyn Fn(&Rank, &[Piece], &[Piece]) -> Result<Pieces>;

/// Applies a function of local pieces: `forward` gets this rank's pieces of the arguments and gives its pieces of the
/// results; `backward` gets the arguments and the cotangents of the results and gives those of all arguments (for integers
/// any piece of their dtype and local shape). That the functions mean what the layouts say is the caller's word. A dry run
/// does not call them, so that what they compute or send is not in its account: there are no numbers that they could read.
///
/// ```
/// use shardgrad_tensor::{Layout, MapLayouts, Mesh, Piece, Rank, Result, Tensor, World, local_map};
///
/// // Squares, by numbers that are brought to the host and back; each rank does its own.
/// fn map(rank: &Rank, x: &Piece, f: impl Fn(usize, f64) -> f64) -> Result<Piece> {
///     let numbers = x.to_f64(rank)?.into_iter().enumerate().map(|(i, x)| f(i, x)).collect::<Vec<f64>>();
///     Piece::upload(rank, &x.view.shape, &numbers)
/// }
/// let squares = World::run(Mesh::parse("a=2")?, |rank| {
///     let layout = [Layout::parse("f64[3@a]", rank.mesh())?];
///     let x = Tensor::from_global(rank, &layout[0], &[1.0, 2.0, 3.0])?;
///     let layouts = MapLayouts { inputs: &layout, outputs: &layout, cotangents: &layout };
///     let forward = |rank: &Rank, x: &[Piece]| Ok([map(rank, &x[0], |_, x| x * x)?].into_iter().collect());
///     let backward = |rank: &Rank, x: &[Piece], dy: &[Piece]| {
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
/// Unwinds with the error: `Kind::Layout` if an argument lies otherwise than stated, or a stated cotangent is not the
/// dual of its argument; `Kind::Shape` if there is no argument, or a function gives more or fewer pieces than are stated, or
/// one that has not the dtype and the local shape of its layout.
#[track_caller]
#[must_use]
pub fn local_map<V: Value>(
    name: &'static str,
    inputs: &[&V],
    layouts: MapLayouts<'_>,
    forward: impl Fn(&Rank, &[Piece]) -> Result<Pieces> + 'static,
    backward: impl Fn(&Rank, &[Piece], &[Piece]) -> Result<Pieces> + 'static,
) -> SmallVec<[V; 2]> {
    unwind(check(name, inputs.len(), layouts));
    V::apply(Rc::new(LocalMap::new(name, layouts, forward, backward)), inputs)
}

/// At most so many arguments.
const INPUTS_MAX: usize = 6;

fn check(name: &str, count: usize, layouts: MapLayouts<'_>) -> Result<()> {
    let MapLayouts { inputs, cotangents, .. } = layouts;
    if count == 0 {
        let text = format!("local_map {name}: no argument; there is at least one");
        return Err(Error::new(Kind::Shape, text)
            .detail("help", "a tensor that is made of nothing is made by Tensor::from_local"));
    }
    let refuse = |text: String| Err(Error::new(Kind::Layout, format!("local_map {name}: {text}")));
    if count != inputs.len() || count != cotangents.len() || count > INPUTS_MAX {
        let (i, c) = (inputs.len(), cotangents.len());
        return refuse(format!(
            "{count} arguments (at most {INPUTS_MAX}), but {i} layouts and {c} of cotangents"
        ));
    }
    for (i, (input, cotangent)) in inputs.iter().zip(cotangents).enumerate() {
        if input.dtype().is_float() && *cotangent != input.dual() {
            let dual = input.dual();
            return refuse(format!("argument {i} is {input}, whose cotangent is {dual}, not {cotangent}"))
                .map_err(|e| {
                    e.detail("help", "a pending cotangent belongs to an argument that is ~ on that axis")
                });
        }
    }
    Ok(())
}

/// The pieces of a user's function if they are what was stated: whatever comes later trusts their layouts.
fn checked(map: &str, function: &str, pieces: Pieces, stated: &[Layout], rank: &Rank) -> Result<Pieces> {
    let refuse = |text: String| {
        Err(Error::new(Kind::Shape, format!("local_map {map}: the {function} function gave {text}")).detail(
            "help",
            "give a piece for each layout, of its dtype and its local_shape(rank.coordinates())",
        ))
    };
    if pieces.len() != stated.len() {
        return refuse(format!("{} pieces for {} stated", pieces.len(), stated.len()));
    }
    for (i, (piece, layout)) in pieces.iter().zip(stated).enumerate() {
        let local = layout.local_shape(rank.coordinates());
        if (piece.dtype, &piece.view.shape) != (layout.dtype(), &local) {
            let [given, right] = [(piece.dtype, &piece.view.shape), (layout.dtype(), &local)]
                .map(|(dtype, shape)| format!("{dtype}{:?}", shape.as_slice()));
            return refuse(format!("{given} as piece {i}; of {layout} this rank holds {right}"));
        }
    }
    Ok(pieces)
}

/// Pieces of these layouts without numbers: what a user's function would give on a dry run.
fn outlines(rank: &Rank, stated: &[Layout]) -> Result<Pieces> {
    let piece = |l: &Layout| Piece::alloc(rank, l.dtype(), &l.local_shape(rank.coordinates()));
    stated.iter().map(piece).collect()
}

/// A label for each dim of each tensor: no two dims need be the same thing.
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

/// Handles of the pieces, for functions that may keep them.
fn owned(pieces: &[&Piece]) -> Vec<Piece> {
    pieces.iter().map(|p| (*p).clone()).collect()
}

struct LocalMap {
    name: &'static str,
    signature: String,
    inputs: Vec<Layout>,
    outputs: Vec<Layout>,
    forward: Box<MapForward>,
    backward: Rc<MapBackward>,
}

/// The arguments of the forward, then the cotangents of its results.
struct LocalMapBackward {
    name: &'static str,
    signature: String,
    num_inputs: usize,
    outputs: Vec<Layout>,
    backward: Rc<MapBackward>,
}

impl LocalMap {
    fn new(
        name: &'static str,
        layouts: MapLayouts<'_>,
        forward: impl Fn(&Rank, &[Piece]) -> Result<Pieces> + 'static,
        backward: impl Fn(&Rank, &[Piece], &[Piece]) -> Result<Pieces> + 'static,
    ) -> LocalMap {
        LocalMap {
            name,
            signature: signature(layouts.inputs, layouts.outputs),
            inputs: layouts.inputs.to_vec(),
            outputs: layouts.outputs.to_vec(),
            forward: Box::new(forward),
            backward: Rc::new(backward),
        }
    }
}

impl fmt::Debug for LocalMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LocalMap({}, {:?} -> {:?})", self.name, self.inputs, self.outputs)
    }
}

impl fmt::Debug for LocalMapBackward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LocalMapBackward({}, {:?})", self.name, self.outputs)
    }
}

impl Op for LocalMap {
    fn name(&self) -> &'static str {
        self.name
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn keeps(&self) -> Keeps {
        const ALL: &[usize] = &[0, 1, 2, 3, 4, 5];
        Keeps { inputs: ALL.split_at(self.inputs.len()).0, outputs: &[] }
    }

    fn dtypes(&self, _: &[DType], _: usize) -> Result<DTypes> {
        Ok(self.outputs.iter().map(Layout::dtype).collect())
    }

    fn infer(
        &self,
        _: &Context,
        args: &[&Layout],
        _: &[DType],
        _: &[Option<Layout>],
    ) -> Result<Rc<Inference>, Refusal> {
        match args.iter().zip(&self.inputs).position(|(arg, stated)| *arg != stated) {
            None => Ok(Rc::new(Inference::direct(args.len(), self.outputs.iter().cloned()))),
            Some(i) => {
                let text =
                    format!("argument {i} is {}, but the map was stated for {}", args[i], self.inputs[i]);
                let hint = format!("bring argument {i} to the layout {} first", self.inputs[i]);
                Err(Refusal::new("stated", text, &[(i, 0)]).hint(hint))
            }
        }
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        if local.rank.is_dry() {
            return outlines(local.rank, &self.outputs);
        }
        let pieces = (self.forward)(local.rank, &owned(x))?;
        checked(self.name, "forward", pieces, &self.outputs, local.rank)
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        let grads: Vec<Tensor> = (0..self.outputs.len()).map(|i| cx.grad(i)).collect();
        let kept = (0..self.inputs.len()).map(|i| cx.input(i));
        let args: Vec<&Tensor> = kept.chain(&grads).collect();
        let layouts: Vec<Layout> = args.iter().map(|t| t.layout().clone()).collect();
        let outputs: Vec<Layout> = self.inputs.iter().map(Layout::dual).collect();
        let op = LocalMapBackward {
            name: self.name,
            signature: signature(&layouts, &outputs),
            num_inputs: self.inputs.len(),
            outputs,
            backward: self.backward.clone(),
        };
        let cotangents = Tensor::results(Rc::new(op), &args);
        cx.each(|i| cotangents[i].clone())
    }
}

impl Op for LocalMapBackward {
    fn name(&self) -> &'static str {
        self.name
    }

    fn signature(&self) -> &str {
        &self.signature
    }

    fn dtypes(&self, _: &[DType], _: usize) -> Result<DTypes> {
        Ok(self.outputs.iter().map(Layout::dtype).collect())
    }

    fn infer(
        &self,
        _: &Context,
        args: &[&Layout],
        _: &[DType],
        _: &[Option<Layout>],
    ) -> Result<Rc<Inference>, Refusal> {
        Ok(Rc::new(Inference::direct(args.len(), self.outputs.iter().cloned())))
    }

    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces> {
        if local.rank.is_dry() {
            return outlines(local.rank, &self.outputs);
        }
        let (inputs, grads) = x.split_at(self.num_inputs);
        let pieces = (self.backward)(local.rank, &owned(inputs), &owned(grads))?;
        checked(self.name, "backward", pieces, &self.outputs, local.rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::piece::launch;
    use shardgrad_dist::{Mesh, World};
    use shardgrad_kernels::Scalar;
    use shardgrad_kernels::op::reduce::SUM;
    use std::cell::RefCell;

    /// The sum of the elements that a rank holds.
    fn total(rank: &Rank, x: &[Piece]) -> Result<Pieces> {
        let mut y = Piece::alloc(rank, x[0].dtype, &[])?;
        launch(rank, &SUM, &[&x[0]], &mut [&mut y], &[Scalar::Int(1), Scalar::Real(1.0)])?;
        Ok([y].into_iter().collect())
    }

    /// Its cotangent, repeated.
    fn repeated(_: &Rank, x: &[Piece], g: &[Piece]) -> Result<Pieces> {
        let view = g[0].view.broadcast(&x[0].view.shape).expect("a scalar repeats to any shape");
        Ok([g[0].viewed(view)].into_iter().collect())
    }

    fn summed(x: &Tensor, cotangents: &[Layout]) -> Tensor {
        let scalar = Layout::parse("f64[] +a", x.rank().mesh()).unwrap();
        let layouts = MapLayouts { inputs: &[x.layout().clone()], outputs: &[scalar], cotangents };
        local_map("total", &[x], layouts, total, repeated).remove(0)
    }

    #[test]
    fn the_cotangent_comes_from_the_backward_function() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let layout = Layout::parse("f64[5@a]", rank.mesh())?;
            let x = Tensor::zeros(rank, &layout)?;
            let scalar = Layout::parse("f64[] +a", rank.mesh())?;
            let (inputs, outputs) = ([layout.clone()], [scalar.clone()]);
            let layouts = MapLayouts { inputs: &inputs, outputs: &outputs, cotangents: &inputs };
            let cotangents = LocalMap::new("total", layouts, total, repeated).vjp(&Vjp {
                rank,
                inputs: &[Some(x)],
                outputs: &[None],
                input_layouts: &inputs,
                output_layouts: &outputs,
                grads: &[Some(Tensor::full(rank, &scalar.dual(), 2.5)?)],
                wanted: &[true],
                taken: RefCell::default(),
                sums: &[],
            });
            let dx = cotangents[0].as_ref().expect("it was wanted");
            assert_eq!((dx.layout(), dx.to_f64()?), (&layout, vec![2.5; 5]));
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn a_local_sum_is_a_pending_sum() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let layout = Layout::parse("f64[5@a]", rank.mesh())?;
            let x = Tensor::from_global(rank, &layout, &[1.0, 2.0, 3.0, 4.0, 5.0])?;
            let y = summed(&x, &[layout]);
            assert_eq!(y.layout().to_string(), "f64[] +a");
            assert_eq!(y.item()?, 15.0);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn layouts_that_do_not_fit_are_refused() {
        let refused = |x: &'static str, cotangent: &'static str| {
            World::run(Mesh::parse("a=2").unwrap(), |rank| {
                let x = Tensor::zeros(rank, &Layout::parse(x, rank.mesh())?)?;
                let _ = summed(&x, &[Layout::parse(cotangent, rank.mesh())?]);
                Ok(())
            })
            .unwrap_err()
            .to_string()
        };
        let error = refused("f64[5@a]", "f64[5] +a");
        assert!(
            error.contains("argument 0 is f64[5@a], whose cotangent is f64[5@a], not f64[5] +a"),
            "{error}"
        );
        assert!(refused("f64[5] ~a", "f64[5]").contains("whose cotangent is f64[5] +a"), "{error}");
    }

    type Make = fn(&Rank, &[Piece]) -> Result<Pieces>;

    const WRONG: [(Make, &str); 4] = [
        (|_, _| Ok(Pieces::new()), "0 pieces for 1"),
        (|_, x| Ok([x[0].clone(), x[0].clone()].into_iter().collect()), "2 pieces for 1"),
        (
            |rank, _| Ok([Piece::filled(rank, DType::F64, &[1], 0.0)?].into_iter().collect()),
            "f64[1] as piece 0; of f64[4@a] this rank holds f64[2]",
        ),
        (|rank, x| Ok([x[0].converted(rank, DType::F32)?].into_iter().collect()), "f32[2] as piece 0;"),
    ];

    #[test]
    fn pieces_that_do_not_fit_the_stated_layouts_are_refused() {
        for (make, what) in WRONG {
            let error = World::run(Mesh::parse("a=2").unwrap(), |rank| {
                let layout = [Layout::parse("f64[4@a]", rank.mesh())?];
                let x = Tensor::zeros(rank, &layout[0])?;
                let layouts = MapLayouts { inputs: &layout, outputs: &layout, cotangents: &layout };
                let _ = local_map("mine", &[&x], layouts, make, |_, x, _| Ok(x.iter().cloned().collect()));
                Ok(())
            })
            .unwrap_err();
            assert_eq!(error.kind(), Kind::Shape, "{error}");
            assert!(error.message().starts_with("local_map mine: the forward function gave"), "{error}");
            assert!(error.message().contains(what), "{error}");
            assert!(error.site().is_some_and(|s| s.file().ends_with("local_map.rs")), "{error}");
            assert!(error.details().iter().any(|d| d.0 == "help"), "{error}");
        }
    }

    #[test]
    fn cotangents_that_do_not_fit_are_refused() {
        for (make, what) in WRONG {
            let error = World::run(Mesh::parse("a=2").unwrap(), |rank| {
                let layout = [Layout::parse("f64[4@a]", rank.mesh())?];
                let x = Tensor::zeros(rank, &layout[0])?;
                let layouts = MapLayouts { inputs: &layout, outputs: &layout, cotangents: &layout };
                let same = |_: &Rank, x: &[Piece]| Ok(x.iter().cloned().collect());
                let _ = LocalMap::new("mine", layouts, same, move |rank, x, _| make(rank, x)).vjp(&Vjp {
                    rank,
                    inputs: &[Some(x.clone())],
                    outputs: &[None],
                    input_layouts: &layout,
                    output_layouts: &layout,
                    grads: &[Some(x)],
                    wanted: &[true],
                    taken: RefCell::default(),
                    sums: &[],
                });
                Ok(())
            })
            .unwrap_err();
            assert_eq!(error.kind(), Kind::Shape, "{error}");
            assert!(error.message().starts_with("local_map mine: the backward function gave"), "{error}");
            assert!(error.message().contains(what), "{error}");
        }
    }

    /// Functions that read numbers, of which a dry run has none.
    #[test]
    fn a_dry_run_calls_no_function() {
        let read = |rank: &Rank, x: &[Piece]| {
            let first = x[0].to_f64(rank)?[0];
            Ok([Piece::upload(rank, &x[0].view.shape, &vec![first; x[0].numel()])?].into_iter().collect())
        };
        let on = |rank: &Rank| {
            let layout = [Layout::parse("f64[4@a]", rank.mesh())?];
            let x = Tensor::full(rank, &layout[0], 1.0)?;
            let layouts = MapLayouts { inputs: &layout, outputs: &layout, cotangents: &layout };
            let y =
                local_map("mine", &[&x], layouts, read, |_, x, _| Ok(x.iter().cloned().collect())).remove(0);
            let dx = LocalMap::new("mine", layouts, read, move |rank, x, _| read(rank, x)).vjp(&Vjp {
                rank,
                inputs: &[Some(x.clone())],
                outputs: &[None],
                input_layouts: &layout,
                output_layouts: &layout,
                grads: &[Some(x)],
                wanted: &[true],
                taken: RefCell::default(),
                sums: &[],
            });
            Ok([y.layout().to_string(), dx[0].as_ref().expect("it was wanted").layout().to_string()])
        };
        assert_eq!(World::new(Mesh::parse("a=2").unwrap()).dry_run(1, on).unwrap(), ["f64[4@a]"; 2]);
        assert_eq!(World::run(Mesh::parse("a=2").unwrap(), on).unwrap()[0], ["f64[4@a]"; 2]);
    }

    #[test]
    fn as_many_elements_as_places_are_uploaded() {
        World::run(Mesh::single(), |rank| {
            for (shape, held) in [(&[2, 3][..], 5), (&[2, 3], 7), (&[], 0), (&[usize::MAX, 2], 1)] {
                let error = Piece::upload(rank, shape, &vec![0.0f64; held]).unwrap_err();
                assert_eq!(error.kind(), Kind::Shape, "{error}");
                assert_eq!(error.message(), format!("{held} elements for a piece of shape {shape:?}"));
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn a_map_of_nothing_is_refused() {
        let error = World::run(Mesh::single(), |rank| {
            let outputs = [Layout::parse("f64[4]", rank.mesh())?];
            let layouts = MapLayouts { inputs: &[], outputs: &outputs, cotangents: &[] };
            let made: SmallVec<[Tensor; 2]> =
                local_map("mine", &[], layouts, |_, _| Ok(Pieces::new()), |_, _, _| Ok(Pieces::new()));
            Ok(made.len())
        })
        .unwrap_err();
        assert_eq!(error.kind(), Kind::Shape, "{error}");
        assert_eq!(error.message(), "local_map mine: no argument; there is at least one");
        assert!(error.site().is_some(), "{error}");
    }
}
