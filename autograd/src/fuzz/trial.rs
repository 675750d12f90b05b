//! One piece of model text on one rank and on a mesh: values, and gradients of what goes in. One rank computes in f64,
//! whatever the floats of the mesh.

use super::marks::Marks;
use crate::id::Id;
use crate::tape::Tape;
use crate::var::Var;
use shardgrad_dist::{Error, Kind, Mesh, Rank, Result, World};
use shardgrad_tensor::check::Global;
use shardgrad_tensor::ops::Input;
use shardgrad_tensor::{DType, Tensor, Value};
use std::fmt;
use std::panic::Location;
use std::time::Duration;

/// What can be said of results in one dtype.
struct Bound {
    /// By how much a value may differ from that of one rank in f64 where arithmetic rounds: of itself, plus this.
    tolerance: f64,
    /// How far values are pushed to see whether they hang on the last bits.
    nudge: f64,
    /// The largest number of programs that are drawn.
    most: f64,
    /// Of numbers below this, multiples of its reciprocal are results of small numbers where nothing is rounded.
    unit: f64,
}

fn bound(dtype: DType) -> Bound {
    match dtype {
        DType::F64 => Bound { tolerance: 1e-7, nudge: 1e-13, most: 1e4, unit: f64::from(1 << 24) },
        _ => Bound { tolerance: 1e-3, nudge: 1e-6, most: 256.0, unit: f64::from(1 << 12) },
    }
}

/// Something that goes into a program.
#[derive(Clone, Debug)]
pub struct Feed {
    /// What it looks like.
    pub input: Input,
    /// How it lies on the mesh.
    pub marks: Marks,
    /// Whether its gradient is asked for.
    pub is_leaf: bool,
}

/// Model text: from what goes in to what comes out.
pub(super) type Text<'a> = dyn Fn(&Tape, &[Var]) -> Result<Vec<Var>> + Sync + 'a;

/// What a mesh makes of a program, compared with one rank.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// The same values and gradients.
    Right,
    /// The values hang on the last bits of the numbers that go in (a comparison, the largest of equals): nothing is said.
    IllPosed,
    /// An op refused its layouts, or its shapes.
    Refused(Error),
    /// Something else, in words.
    Wrong(String),
}

/// One rank's results, whole.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) outputs: Vec<Global>,
    /// By input; `None` where no gradient arrives.
    pub(super) gradients: Vec<Option<Global>>,
}

impl Made {
    fn all(&self) -> impl Iterator<Item = &Global> {
        self.outputs.iter().chain(self.gradients.iter().flatten())
    }

    /// Whether all numbers are finite and of moderate size for a dtype.
    pub(super) fn is_moderate(&self, dtype: DType) -> bool {
        self.all().all(|x| is_moderate(x, dtype))
    }

    /// The same with floats of a dtype; the numbers stay.
    fn in_dtype(&self, dtype: DType) -> Made {
        let of = |g: &Global| in_dtype(g.clone(), dtype);
        let gradients = self.gradients.iter().map(|g| g.as_ref().map(of)).collect();
        Made { outputs: self.outputs.iter().map(of).collect(), gradients }
    }

    fn is_near(&self, other: &Made, tolerance: f64) -> bool {
        let near = |(a, b): (&f64, &f64)| (a - b).abs() <= tolerance * (1.0 + b.abs());
        let same =
            |(a, b): (&Global, &Global)| a.data.len() == b.data.len() && a.data.iter().zip(&b.data).all(near);
        self.all().zip(other.all()).all(same)
    }
}

/// Whether all elements are finite, and at most 10^4 in f64, 256 in f32.
pub(super) fn is_moderate(x: &Global, dtype: DType) -> bool {
    x.data.iter().all(|x| x.abs() <= bound(dtype).most)
}

fn in_dtype(global: Global, dtype: DType) -> Global {
    Global { dtype: if global.dtype == DType::F64 { dtype } else { global.dtype }, ..global }
}

/// Text with what goes into it.
pub(super) struct Trial<'a> {
    pub(super) inputs: &'a [Feed],
    pub(super) seed: u64,
    /// Of the floats that go in on the mesh.
    pub(super) dtype: DType,
    /// Whether no op in the text rounds on small binary fractions.
    pub(super) is_exact: bool,
    pub(super) text: &'a Text<'a>,
}

impl fmt::Debug for Trial<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Trial({:?})", self.inputs)
    }
}

impl Trial<'_> {
    /// Numbers that go in, in f64. For f32 they are whole, so that most sums and products are exact in it. So they are for every
    /// third seed in f64: of few whole numbers many are equal, and tie for the largest.
    fn draw(&self, input: &Input, seed: u64) -> Global {
        let mut drawn = Global::draw(input, seed);
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

    fn globals(&self) -> Vec<Global> {
        let draw = |(i, feed): (usize, &Feed)| self.draw(&feed.input, self.seed + i as u64);
        self.inputs.iter().enumerate().map(draw).collect()
    }

    /// Outputs and gradients for arguments that lie on this rank already.
    fn run(&self, rank: &Rank, args: &[Tensor]) -> Result<(Vec<Tensor>, Vec<Option<Tensor>>)> {
        let tape = Tape::new(rank);
        let var = |(i, (x, feed)): (usize, (&Tensor, &Feed))| match feed.is_leaf {
            true => tape.leaf(i as u64, x),
            false => tape.constant(x.clone()),
        };
        let vars: Vec<Var> = args.iter().zip(self.inputs).enumerate().map(var).collect();
        let outputs = (self.text)(&tape, &vars)?;
        let mut seeds: Vec<(Id, Tensor)> = Vec::new();
        for (i, y) in outputs.iter().enumerate() {
            if let Some(id) = y.id() {
                let drawn = self.draw(&Input::real(&y.shape()), self.seed + 1000 + i as u64);
                let seed = Global { dtype: y.dtype(), ..drawn };
                seeds.push((id, seed.place(rank, &y.layout().dual())?));
            }
        }
        let outputs = outputs.iter().map(|y| y.tensor().clone()).collect();
        drop(vars);
        tape.backward_from(seeds);
        let mut gradients = tape.gradients();
        Ok((outputs, (0..args.len()).map(|i| gradients.remove(&(i as u64))).collect()))
    }

    /// What one rank makes of the text.
    ///
    /// # Errors
    /// What the text reports.
    pub(super) fn on_one_rank(&self) -> Result<Made> {
        self.alone(&self.globals())
    }

    fn alone(&self, globals: &[Global]) -> Result<Made> {
        let made = World::run(Mesh::single(), |rank| {
            let args: Vec<Tensor> = globals
                .iter()
                .map(|g| g.place(rank, &Marks::whole(g.shape.len()).layout(rank.mesh(), g.dtype, &g.shape)?))
                .collect::<Result<_>>()?;
            let (outputs, gradients) = self.run(rank, &args)?;
            let global = |t: &Tensor| {
                Ok(Global { dtype: t.dtype(), shape: t.shape().to_vec(), data: t.to_local_f64()? })
            };
            Ok(Made {
                outputs: outputs.iter().map(global).collect::<Result<_>>()?,
                gradients: gradients
                    .iter()
                    .map(|g| g.as_ref().map(global).transpose())
                    .collect::<Result<_>>()?,
            })
        });
        Ok(made?.remove(0))
    }

    /// Whether numbers that differ in their last bits give results that differ by more, or one rank cannot hold the results in
    /// the dtype of the mesh either: where a value ends a step (1 - 1e-9 is 1 in f32), its floor is another.
    fn is_ill_posed(&self, made: &Made) -> Result<bool> {
        let Bound { nudge, tolerance, .. } = bound(self.dtype);
        if self.dtype != DType::F64 && !self.alone_in_dtype()?.is_near(made, tolerance / 10.0) {
            return Ok(true);
        }
        for by in [nudge, -nudge] {
            let mut globals = self.globals();
            for (i, global) in globals.iter_mut().enumerate().filter(|(_, g)| g.dtype.is_float()) {
                let sign = |at: usize| if (at * 7 + i * 3) % 5 < 2 { -by } else { by };
                let nudged = |at: usize, x: f64| if x == 0.0 { sign(at) } else { x + x * sign(at) };
                global.data.iter_mut().enumerate().for_each(|(at, x)| *x = nudged(at, *x));
            }
            if !self.alone(&globals)?.is_near(made, tolerance / 10.0) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether one rank rounds too in the dtype of the mesh: f32 has too few bits for some values on the way.
    fn is_rounded(&self, made: &Made) -> Result<bool> {
        Ok(self.dtype != DType::F64 && !self.alone_in_dtype()?.is_near(made, 0.0))
    }

    /// What one rank makes of it in the dtype of the mesh.
    fn alone_in_dtype(&self) -> Result<Made> {
        let globals: Vec<Global> = self.globals().into_iter().map(|g| in_dtype(g, self.dtype)).collect();
        self.alone(&globals)
    }

    /// Compares a mesh with what one rank made in f64.
    ///
    /// # Errors
    /// `Kind::Config` where marks do not fit their values.
    pub(super) fn on_mesh(&self, mesh: &Mesh, made: &Made) -> Result<Verdict> {
        let Bound { tolerance, unit, .. } = bound(self.dtype);
        let is_short = |x: &f64| x.abs() < unit && (x * unit).fract() == 0.0;
        let are_short = |g: &Global| g.data.iter().all(is_short);
        // Without rounding on the way forward a mesh has the same ties as one rank, and elements that tie share a gradient alike.
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

    /// What is wrong on this rank. Every rank goes on to the end, since the others wait for it.
    fn compare(&self, rank: &Rank, made: &Made, tolerance: f64) -> Result<Option<String>> {
        let site = Location::caller();
        let place = |(g, feed): (Global, &Feed)| {
            let g = in_dtype(g, self.dtype);
            g.place(rank, &feed.marks.layout(rank.mesh(), g.dtype, &g.shape)?)
        };
        let args: Vec<Tensor> =
            self.globals().into_iter().zip(self.inputs).map(place).collect::<Result<_>>()?;
        let (outputs, gradients) = self.run(rank, &args)?;
        let mut finding = None;
        for (i, (y, want)) in outputs.iter().zip(&made.outputs).enumerate() {
            let found = want.differs(y, tolerance, site)?;
            finding = finding.or(found.map(|f| format!("output {i} ({}) {f}", y.layout())));
        }
        for (i, (gradient, want)) in gradients.iter().zip(&made.gradients).enumerate() {
            let found = match (gradient, want) {
                (None, None) => None,
                (Some(_), None) => Some("is there and should not be".to_string()),
                (None, Some(_)) => Some("is missing".to_string()),
                (Some(g), Some(_)) if *g.layout() != args[i].layout().dual() => {
                    Some(format!("lies as {} beside {}", g.layout(), args[i].layout()))
                }
                (Some(g), Some(want)) => want.differs(g, tolerance, site)?,
            };
            finding = finding.or(found.map(|f| format!("the gradient of input {i} {f}")));
        }
        Ok(finding)
    }
}
