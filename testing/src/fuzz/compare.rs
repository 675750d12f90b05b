//! Comparison of a model on one rank and on a mesh: values, and gradients of the inputs. The single rank computes in
//! f64, whatever the float dtype of the mesh.

use super::layout_pattern::LayoutPattern;
use crate::global_tensor::GlobalTensor;
use shardgrad_autograd::{Tape, Var};
use shardgrad_dist::{Error, Kind, Mesh, Rank, Result, World};
use shardgrad_tensor::ops::Input;
use shardgrad_tensor::{DType, Tensor, Value};
use std::fmt;
use std::panic::Location;
use std::time::Duration;

/// Tolerances and bounds of a dtype.
struct Tolerances {
    /// The allowed difference from one rank in f64 where arithmetic rounds, absolute and relative: |a - b| <= tolerance
    /// (1 + |b|).
    tolerance: f64,
    /// The relative perturbation of inputs that tests whether results depend on the last bits.
    nudge: f64,
    /// The largest absolute value of results in a drawn program.
    most: f64,
    /// Below this, multiples of its reciprocal are results of small numbers without rounding.
    unit: f64,
}

fn tolerances(dtype: DType) -> Tolerances {
    match dtype {
        DType::F64 => Tolerances { tolerance: 1e-7, nudge: 1e-13, most: 1e4, unit: f64::from(1 << 24) },
        _ => Tolerances { tolerance: 1e-3, nudge: 1e-6, most: 256.0, unit: f64::from(1 << 12) },
    }
}

/// An input of a program.
#[derive(Clone, Debug)]
pub struct TestInput {
    /// Its shape and values.
    pub input: Input,
    /// Its layout on the mesh.
    pub layout: LayoutPattern,
    /// Whether its gradient is compared.
    pub is_leaf: bool,
}

/// A model: a function from inputs to outputs on a tape.
pub(super) type Model<'a> = dyn Fn(&Tape, &[Var]) -> Result<Vec<Var>> + Sync + 'a;

/// The outcome of comparing a mesh with one rank.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// The same values and gradients.
    Right,
    /// No statement: the values depend on the last bits of the inputs (a comparison, the largest of near-equal
    /// elements).
    IllPosed,
    /// An op refused its layouts or shapes.
    Refused(Error),
    /// Another difference or error, in words.
    Wrong(String),
}

/// Global results of one rank.
#[derive(Debug)]
pub(super) struct Results {
    pub(super) outputs: Vec<GlobalTensor>,
    /// By input; `None` without a gradient.
    pub(super) gradients: Vec<Option<GlobalTensor>>,
}

impl Results {
    fn all(&self) -> impl Iterator<Item = &GlobalTensor> {
        self.outputs.iter().chain(self.gradients.iter().flatten())
    }

    /// Whether all numbers are finite and of moderate size for a dtype.
    pub(super) fn is_moderate(&self, dtype: DType) -> bool {
        self.all().all(|x| is_moderate(x, dtype))
    }

    /// The same numbers with another float dtype.
    fn in_dtype(&self, dtype: DType) -> Results {
        let of = |g: &GlobalTensor| in_dtype(g.clone(), dtype);
        let gradients = self.gradients.iter().map(|g| g.as_ref().map(of)).collect();
        Results { outputs: self.outputs.iter().map(of).collect(), gradients }
    }

    fn is_near(&self, other: &Results, tolerance: f64) -> bool {
        let near = |(a, b): (&f64, &f64)| (a - b).abs() <= tolerance * (1.0 + b.abs());
        let same = |(a, b): (&GlobalTensor, &GlobalTensor)| {
            a.data.len() == b.data.len() && a.data.iter().zip(&b.data).all(near)
        };
        self.all().zip(other.all()).all(same)
    }
}

/// Whether all elements are finite, and at most 10^4 in f64 or 256 in f32.
pub(super) fn is_moderate(x: &GlobalTensor, dtype: DType) -> bool {
    x.data.iter().all(|x| x.abs() <= tolerances(dtype).most)
}

fn in_dtype(global: GlobalTensor, dtype: DType) -> GlobalTensor {
    GlobalTensor { dtype: if global.dtype == DType::F64 { dtype } else { global.dtype }, ..global }
}

/// A model with its inputs.
pub(super) struct Comparison<'a> {
    pub(super) inputs: &'a [TestInput],
    pub(super) seed: u64,
    /// The float dtype of the inputs on the mesh.
    pub(super) dtype: DType,
    /// Whether no op of the model rounds on small binary fractions.
    pub(super) is_exact: bool,
    pub(super) model: &'a Model<'a>,
}

impl fmt::Debug for Comparison<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Comparison({:?})", self.inputs)
    }
}

impl Comparison<'_> {
    /// The values of an input, in f64. For f32, and for every third seed in f64, they are whole numbers: most sums and
    /// products of them are exact in f32, and many elements are equal, so that they tie for the largest.
    fn draw(&self, input: &Input, seed: u64) -> GlobalTensor {
        let mut drawn = GlobalTensor::draw(input, seed);
        let is_whole = self.dtype != DType::F64 || self.seed.is_multiple_of(3);
        if is_whole && drawn.dtype.is_float() {
            drawn.data.iter_mut().for_each(|x| {
                *x = match input {
                    Input::Positive(_) => x.ceil(),
                    Input::Distinct(_) => *x * 8.0,
                    Input::Offset(_, centre) => centre + ((*x - centre) * 1.5).round(),
                    _ => (*x * 1.5).round(),
                }
            });
        }
        drawn
    }

    fn globals(&self) -> Vec<GlobalTensor> {
        let draw = |(i, test_input): (usize, &TestInput)| self.draw(&test_input.input, self.seed + i as u64);
        self.inputs.iter().enumerate().map(draw).collect()
    }

    /// Runs the model forward and backward on arguments of this rank.
    fn run(&self, rank: &Rank, args: &[Tensor]) -> Result<(Vec<Tensor>, Vec<Option<Tensor>>)> {
        let tape = Tape::new(rank);
        let var = |(i, (x, test_input)): (usize, (&Tensor, &TestInput))| match test_input.is_leaf {
            true => tape.leaf(i as u64, x),
            false => tape.constant(x.clone()),
        };
        let vars: Vec<Var> = args.iter().zip(self.inputs).enumerate().map(var).collect();
        let outputs = (self.model)(&tape, &vars)?;
        let tensors = outputs.iter().map(|y| y.tensor().clone()).collect();
        let mut cotangents: Vec<(Var, Tensor)> = Vec::new();
        for (i, y) in outputs.into_iter().enumerate().filter(|(_, y)| y.requires_grad()) {
            let drawn = self.draw(&Input::real(&y.shape()), self.seed + 1000 + i as u64);
            let drawn = GlobalTensor { dtype: y.dtype(), ..drawn };
            let cotangent = drawn.distribute(rank, &y.layout().dual())?;
            cotangents.push((y, cotangent));
        }
        drop(vars);
        tape.backward(cotangents)?;
        let mut gradients = tape.gradients();
        Ok((tensors, (0..args.len()).map(|i| gradients.remove(&(i as u64))).collect()))
    }

    /// The results of one rank in f64.
    ///
    /// # Errors
    /// The errors of the model.
    pub(super) fn on_one_rank(&self) -> Result<Results> {
        self.single_rank(&self.globals())
    }

    fn single_rank(&self, globals: &[GlobalTensor]) -> Result<Results> {
        let made = World::run(Mesh::single(), |rank| {
            let args: Vec<Tensor> = globals
                .iter()
                .map(|g| {
                    g.distribute(
                        rank,
                        &LayoutPattern::unsharded(g.shape.len()).layout(rank.mesh(), g.dtype, &g.shape)?,
                    )
                })
                .collect::<Result<_>>()?;
            let (outputs, gradients) = self.run(rank, &args)?;
            let global = |t: &Tensor| {
                Ok(GlobalTensor { dtype: t.dtype(), shape: t.shape().to_vec(), data: t.to_local_f64()? })
            };
            Ok(Results {
                outputs: outputs.iter().map(global).collect::<Result<_>>()?,
                gradients: gradients
                    .iter()
                    .map(|g| g.as_ref().map(global).transpose())
                    .collect::<Result<_>>()?,
            })
        });
        Ok(made?.remove(0))
    }

    /// Whether results depend on the last bits of the inputs, or one rank in the dtype of the mesh gets other results
    /// too. Example: floor just below a step, where 1 - 1e-9 is 1 in f32.
    fn is_ill_posed(&self, made: &Results) -> Result<bool> {
        let Tolerances { nudge, tolerance, .. } = tolerances(self.dtype);
        if self.dtype != DType::F64 && !self.single_rank_in_dtype()?.is_near(made, tolerance / 10.0) {
            return Ok(true);
        }
        for by in [nudge, -nudge] {
            let mut globals = self.globals();
            for (i, global) in globals.iter_mut().enumerate().filter(|(_, g)| g.dtype.is_float()) {
                let sign = |at: usize| if (at * 7 + i * 3) % 5 < 2 { -by } else { by };
                let nudged = |at: usize, x: f64| if x == 0.0 { sign(at) } else { x + x * sign(at) };
                global.data.iter_mut().enumerate().for_each(|(at, x)| *x = nudged(at, *x));
            }
            if !self.single_rank(&globals)?.is_near(made, tolerance / 10.0) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether one rank in the dtype of the mesh rounds too: f32 has too few bits for some intermediate values.
    fn is_rounded(&self, made: &Results) -> Result<bool> {
        Ok(self.dtype != DType::F64 && !self.single_rank_in_dtype()?.is_near(made, 0.0))
    }

    /// The results of one rank in the dtype of the mesh.
    fn single_rank_in_dtype(&self) -> Result<Results> {
        let globals: Vec<GlobalTensor> =
            self.globals().into_iter().map(|g| in_dtype(g, self.dtype)).collect();
        self.single_rank(&globals)
    }

    /// Compares a mesh with the results of one rank in f64.
    ///
    /// # Errors
    /// `Kind::Config` if a layout pattern does not fit its value.
    pub(super) fn on_mesh(&self, mesh: &Mesh, made: &Results) -> Result<Verdict> {
        let Tolerances { tolerance, unit, .. } = tolerances(self.dtype);
        let is_short = |x: &f64| x.abs() < unit && (x * unit).fract() == 0.0;
        let are_short = |g: &GlobalTensor| g.data.iter().all(is_short);
        // With an exact forward pass the mesh has the same ties as one rank, and tied elements share a gradient alike.
        let mut has_exact_values = self.is_exact && made.outputs.iter().all(are_short);
        let is_exact = has_exact_values && made.gradients.iter().flatten().all(are_short);
        let want = made.in_dtype(self.dtype);
        let found = |tolerance| -> Result<Option<String>> {
            let world = World::new(mesh.clone()).threads(1).timeout(Duration::from_secs(20));
            let all = world.launch(|rank| self.compare(rank, &want, tolerance))?;
            Ok(all.into_iter().flatten().next())
        };
        let mut finding = found(if is_exact { 0.0 } else { tolerance });
        if matches!(finding, Ok(Some(_))) && is_exact && self.is_rounded(made).unwrap_or(true) {
            has_exact_values = false;
            finding = found(tolerance);
        }
        Ok(match finding {
            Ok(None) => Verdict::Right,
            Ok(Some(_)) if !has_exact_values && self.is_ill_posed(made).unwrap_or(true) => Verdict::IllPosed,
            Ok(Some(what)) => Verdict::Wrong(what),
            Err(e) if e.kind() == Kind::Config => return Err(e),
            Err(e) if [Kind::Layout, Kind::Shape, Kind::DType].contains(&e.kind()) => Verdict::Refused(e),
            Err(e) => Verdict::Wrong(e.to_string()),
        })
    }

    /// The first difference on this rank. A rank continues after a difference, because the other ranks wait for its
    /// collectives.
    fn compare(&self, rank: &Rank, made: &Results, tolerance: f64) -> Result<Option<String>> {
        let site = Location::caller();
        let distribute = |(g, test_input): (GlobalTensor, &TestInput)| {
            let g = in_dtype(g, self.dtype);
            g.distribute(rank, &test_input.layout.layout(rank.mesh(), g.dtype, &g.shape)?)
        };
        let args: Vec<Tensor> =
            self.globals().into_iter().zip(self.inputs).map(distribute).collect::<Result<_>>()?;
        let (outputs, gradients) = self.run(rank, &args)?;
        let mut finding = None;
        for (i, (y, want)) in outputs.iter().zip(&made.outputs).enumerate() {
            let found = want.find_mismatch(y, tolerance, site)?;
            finding = finding.or(found.map(|f| format!("output {i} ({}) {f}", y.layout())));
        }
        for (i, (gradient, want)) in gradients.iter().zip(&made.gradients).enumerate() {
            let found = match (gradient, want) {
                (None, None) => None,
                (Some(_), None) => Some("exists, on one rank there is none".to_string()),
                (None, Some(_)) => Some("is missing".to_string()),
                (Some(g), Some(_)) if *g.layout() != args[i].layout().dual() => {
                    Some(format!("has the layout {}, the input has {}", g.layout(), args[i].layout()))
                }
                (Some(g), Some(want)) => want.find_mismatch(g, tolerance, site)?,
            };
            finding = finding.or(found.map(|f| format!("the gradient of input {i} {f}")));
        }
        Ok(finding)
    }
}
