//! Muon: momentum orthogonalized by Newton-Schulz iterations, for matrices. Jordan et al. 2024,
//! <https://kellerjordan.github.io/posts/muon/>.

use super::hyperparameter::{BELOW_ONE, NOT_NEGATIVE, check_setting};
use super::matrices::{Matrix, fans, matrix_shape};
use super::optimizer::{Optimizer, OptimizerState};
use super::param_group::{ParamGroup, ParamGroups};
use super::velocities::Velocities;
use crate::module::param::Param;
use shardgrad_tensor::training_step::optimizer_step::Velocity;
use shardgrad_tensor::{Error, Hyperparameters, Kind, OverflowCheck, Result, Tensor, Value};

/// Number of Newton-Schulz iterations.
const NUM_ITERATIONS: usize = 5;
/// Coefficients of x, x^3 and x^5 of an iteration, chosen by Jordan et al. for the steepest slope at 0: after five iterations
/// the singular values are about 0.7 to 1.2.
const COEFFICIENTS: [f64; 3] = [3.4445, -4.7750, 2.0315];
/// Added to the norm by which a matrix is divided before the iterations.
const NORM_EPS: f64 = 1e-7;

/// Factor on the orthogonalized update of a matrix.
#[doc(alias = "adjust_lr_fn")]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum MuonScale {
    /// sqrt(max(1, outputs / inputs)), by Jordan et al.: updates of equal spectral effect on layers of any shape.
    #[doc(alias = "original")]
    #[default]
    Original,
    /// 0.2 sqrt(max(rows, columns)), by Liu et al. (arXiv 2502.16982, section 2.2): updates with the root mean square of AdamW's,
    /// so that learning rate and weight decay of AdamW carry over.
    #[doc(alias = "match_rms_adamw")]
    MatchRmsAdamW,
}

/// Muon optimizer, for parameters that are matrices in files: give embeddings, output layers, biases and norms another
/// optimizer ([`Optimizers`](super::Optimizers)).
///
/// ```text
/// v = momentum v + (1 - momentum) g
/// u = v                           (Nesterov, the default: u = momentum v + (1 - momentum) g)
/// x = u / (|u| + 1e-7), transposed if it has more rows than columns
/// x = a x + (b x x^T + c (x x^T)^2) x, five times, with a, b, c = 3.4445, -4.7750, 2.0315
/// w = w - lr decay w - lr scale x
/// ```
///
/// The velocity has the layout of the stored parameter and its accumulator dtype (f32 for the 16-bit floats), in which the
/// iterations run too. Each matrix is orthogonalized whole, on one rank of the mesh, under any plan
/// ([`Optimizer::map_matrices`] states which dims are a matrix, and the bytes); an update has the bits of the update on one rank
/// if gradients have. Under a pipeline each stage does so for its own parameters.
///
/// An iteration on n x m numbers, n <= m, takes 4 n^2 m + 2 n^3 FLOPs. For a square matrix, all five are 5 n / T of the 6 n^2 T
/// FLOPs of its products in a training step with T tokens: 2% with width 4096 and a million tokens.
///
/// The rule is made of tensor ops, so the update is not captured as a CUDA graph: in a trainer on one GPU, forward and backward replay
/// as a graph, then the host waits for the overflow check and launches some 55 kernels for each matrix. A step whose kernels run shorter
/// than these launches waits for the host.
#[doc(alias = "torch.optim.Muon")]
#[doc(alias = "optax.contrib.muon")]
#[doc(alias = "Newton-Schulz")]
#[derive(Clone, Debug)]
pub struct Muon {
    lr: f64,
    momentum: f64,
    nesterov: bool,
    weight_decay: f64,
    scale: MuonScale,
    groups: ParamGroups,
    velocities: Velocities,
}

impl Muon {
    /// Returns Muon with Nesterov momentum 0.95, the scale of Jordan et al. and no weight decay.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` for a learning rate that is negative or not finite.
    #[track_caller]
    #[must_use]
    pub fn new(lr: f64) -> Muon {
        check_setting("the learning rate", lr, NOT_NEGATIVE);
        Muon {
            lr,
            momentum: 0.95,
            nesterov: true,
            weight_decay: 0.0,
            scale: MuonScale::Original,
            groups: ParamGroups::default(),
            velocities: Velocities::default(),
        }
    }

    /// Sets the momentum.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if the momentum is not in `0..1`.
    #[track_caller]
    #[must_use]
    pub fn momentum(self, momentum: f64) -> Muon {
        check_setting("the momentum", momentum, BELOW_ONE);
        Muon { momentum, ..self }
    }

    /// Uses Nesterov momentum, or plain momentum.
    #[must_use]
    pub fn nesterov(self, nesterov: bool) -> Muon {
        Muon { nesterov, ..self }
    }

    /// Sets the factor on the update of a matrix.
    #[must_use]
    pub fn scale(self, scale: MuonScale) -> Muon {
        Muon { scale, ..self }
    }

    /// Sets the weight decay: each step subtracts lr times decay times the parameter.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if the decay is negative or not finite.
    #[track_caller]
    #[must_use]
    pub fn weight_decay(self, weight_decay: f64) -> Muon {
        check_setting("the weight decay", weight_decay, NOT_NEGATIVE);
        Muon { weight_decay, ..self }
    }

    /// Adds a parameter group: other settings for parameters whose names match a pattern. Later groups take
    /// precedence, setting by setting. [`Optimizer::check_params`] refuses a pattern that matches no parameter.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` for a setting that is negative or not finite.
    #[doc(alias = "param_groups")]
    #[track_caller]
    #[must_use]
    pub fn group(mut self, pattern: &str, group: ParamGroup) -> Muon {
        self.groups.push(pattern, group);
        self
    }

    /// Returns the velocity (momentum buffer) of a parameter, once an update of the parameter was tried.
    #[doc(alias = "momentum_buffer")]
    #[must_use]
    pub fn velocity(&self, param: &Param) -> Option<Tensor> {
        self.velocities.tensor(param)
    }

    /// Returns the factor on the orthogonalized update of a parameter.
    fn scale_of(&self, param: &Param) -> f64 {
        let shape = matrix_shape(param).unwrap_or([1, 1]);
        let [fan_in, fan_out] = fans(param, shape).map(|n| n as f64);
        match self.scale {
            MuonScale::Original => (fan_out / fan_in).max(1.0).sqrt(),
            MuonScale::MatchRmsAdamW => 0.2 * fan_in.max(fan_out).sqrt(),
        }
    }
}

/// Moves the singular values of a matrix to about 1, by five Newton-Schulz iterations.
fn orthogonalized(matrix: &Tensor) -> Result<Tensor> {
    let [a, b, c] = COEFFICIENTS;
    let is_tall = matrix.layout().extent(0) > matrix.layout().extent(1);
    let wide = |x: &Tensor| if is_tall { x.permute(&[1, 0]).contiguous() } else { Ok(x.clone()) };
    let norm = matrix.sum_squares().sqrt().add_scalar(NORM_EPS).cast(matrix.dtype());
    let mut x = wide(matrix)?.div(&norm);
    for _ in 0..NUM_ITERATIONS {
        let gram = x.matmul_nt(&x);
        let polynomial = gram.scale(b).add(&gram.matmul(&gram).scale(c));
        x = x.scale(a).add(&polynomial.matmul(&x));
    }
    wide(&x)
}

impl Optimizer for Muon {
    fn lr(&self) -> f64 {
        self.lr
    }

    fn describe(&self) -> String {
        let Muon { lr, momentum, nesterov, weight_decay, scale, groups, velocities } = self;
        let num_steps = velocities.num_steps();
        let nesterov = if *nesterov { " after Nesterov" } else { "" };
        format!(
            "Muon lr {lr}, momentum {momentum}{nesterov}, scale {scale:?}, weight decay {weight_decay}, groups {groups}, after {num_steps} steps"
        )
    }

    fn num_steps(&self) -> u64 {
        self.velocities.num_steps()
    }

    fn check_params(&self, params: &[Param]) -> Result<()> {
        let is_vector = |param: &&Param| !param.is_frozen() && matrix_shape(param).is_none();
        if let Some(vector) = params.iter().find(is_vector) {
            let text = format!(
                "Muon updates matrices, but parameter `{}` has the shape {:?}",
                vector.name(),
                vector.file_shape()
            );
            let help = "give vectors another optimizer: Optimizers::new().on(\"*.weight\", Muon::new(0.02)).otherwise(AdamW::new(3e-4))";
            return Err(Error::new(Kind::Config, text).detail("help", help));
        }
        self.groups.check(params)
    }

    fn param_state(&self, param: &Param) -> Option<OptimizerState> {
        self.velocities.state(param)
    }

    fn state_names(&self, _: &Param) -> Option<Vec<&'static str>> {
        Some(vec![Velocities::NAME])
    }

    fn load_state(&mut self, num_steps: u64, states: Vec<(Param, OptimizerState)>) -> Result<()> {
        self.velocities.load(num_steps, &states)
    }

    fn hyperparameters(&mut self, params: &[&Param], lr: f64) -> Result<Hyperparameters> {
        let mut rows = Vec::with_capacity(params.len());
        for param in params {
            self.velocities.get_or_zeros(param)?;
            rows.push(self.groups.of(param, lr, self.weight_decay).to_vec());
        }
        Ok(rows)
    }

    fn apply_update(&mut self, params: &[(&Param, Tensor)], step: &OverflowCheck) -> Result<()> {
        let velocities = self.velocities.of_update(params)?;
        let Some((rows, grad_scale)) = step.host_update()? else { return Ok(()) };
        let mut updates = Vec::with_capacity(params.len());
        for (param, gradient) in params {
            let rank = gradient.rank();
            let velocity = velocities.get_mut(&param.key()).expect("each parameter has a velocity");
            let before = velocity.tensor(rank);
            let new = gradient.cast(before.dtype()).scale((1.0 - self.momentum) * grad_scale);
            let after = before.scale(self.momentum).add(&new);
            *velocity = Velocity::from_tensor(&param.layout(), &after)?;
            updates.push((*param, if self.nesterov { after.scale(self.momentum).add(&new) } else { after }));
        }
        let directions =
            self.map_matrices(&updates, &mut |matrix: Matrix<'_>| orthogonalized(&matrix.value))?;
        drop(updates);
        for (((param, _), direction), row) in params.iter().zip(directions).zip(rows) {
            let [lr, weight_decay] = row[..] else {
                let text =
                    format!("a Muon step needs 2 hyperparameters per parameter, but has {}", row.len());
                let help = "select the parameters whose hyperparameters the optimizer gave with `OverflowCheck::for_params`";
                return Err(Error::new(Kind::Config, text).detail("help", help));
            };
            let stored = param.tensor();
            let decayed = stored.cast(direction.dtype()).scale(1.0 - lr * weight_decay);
            let updated = decayed.sub(&direction.scale(lr * self.scale_of(param)));
            param.set_tensor(updated.cast(stored.dtype()))?;
        }
        Ok(())
    }

    fn count_step(&mut self, _: &[&Param]) {
        self.velocities.count_step();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::abs_diff_eq;
    use shardgrad_tensor::{Mesh, World};

    #[test]
    fn iterations_move_singular_values_to_one() {
        World::run(Mesh::single(), |rank| {
            // Singular values of a diagonal matrix are its entries; those of its products too.
            let quintic = |mut x: f64| {
                let [a, b, c] = COEFFICIENTS;
                (0..NUM_ITERATIONS).for_each(|_| x = a * x + b * x.powi(3) + c * x.powi(5));
                x
            };
            let entries = [3.0, 0.5, 2.0];
            let norm = entries.iter().map(|x| x * x).sum::<f64>().sqrt() + NORM_EPS;
            for [rows, columns] in [[3, 4], [4, 3]] {
                let place = |i: usize| i * columns + i;
                let mut numbers = vec![0.0; rows * columns];
                entries.iter().enumerate().for_each(|(i, x)| numbers[place(i)] = *x);
                let result = orthogonalized(&Tensor::from_host(rank, &[rows, columns], &numbers)?)?;
                assert_eq!(&result.shape()[..], [rows, columns]);
                let result = result.to_f64()?;
                for (i, x) in entries.iter().enumerate() {
                    let expected = quintic(x / norm);
                    assert!(abs_diff_eq!(result[place(i)], expected, epsilon = 1e-12), "{result:?}");
                    assert!((0.65..1.25).contains(&expected), "{expected}");
                }
                let others = result.iter().enumerate().filter(|(i, _)| (0..3).all(|d| place(d) != *i));
                assert!(others.into_iter().all(|(_, x)| *x == 0.0));
            }
            let zeros = orthogonalized(&Tensor::from_host(rank, &[2, 2], &[0.0f32; 4])?)?;
            assert_eq!(zeros.to_f64()?, [0.0; 4]);
            Ok(())
        })
        .unwrap();
    }
}
