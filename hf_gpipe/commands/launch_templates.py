"""The files that start a job, one for each engine. A name after @ is filled in by launch_file.py; $ is the shell's."""

from __future__ import annotations

from string import Template


class FileTemplate(Template):
    """A text with placeholders such as @nodes or @{nodes}."""

    delimiter = "@"


#: Waits for torchrun and passes on the signal that the engine sends. torchrun hides the exit code 75 of a training that
#: a signal has stopped; the marker in the output directory brings it back.
RUN = FileTemplate("""\
stopped=@marker
rm -f "$stopped"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=@shutdown_seconds
torchrun @rendezvous \\
    -m hf_gpipe.train @arguments &
torchrun=$!
trap 'kill -TERM "$torchrun"' TERM INT
wait "$torchrun"; code=$?
# A signal ends that wait. torchrun ends once its processes have saved.
while kill -0 "$torchrun" 2>/dev/null; do wait "$torchrun"; code=$?; done
# Stopped by a signal, and all is saved: start it again to go on.
if [ -e "$stopped" ]; then exit 75; fi
exit "$code"
""")

TORCHRUN = FileTemplate("""\
#!/bin/bash
@comments
@how
# Exit code 75: a signal has stopped the training and all is saved; run it again to go on.
@run""")

#: The secret by which the processes of a run know each other (docs/security.md), unless one is given.
SECRET = """\
export HF_GPIPE_SECRET=${HF_GPIPE_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')}"""

ONE_MACHINE = f"""\
# bash FILE
{SECRET}"""

EVERY_MACHINE = """\
# Run it on every machine, in the same directory, with the machine's number and the first machine's name or address:
#     bash FILE 0 FIRST        on FIRST itself, which reads the data
#     bash FILE 1 FIRST        on the second, and so on
# First export HF_GPIPE_SECRET, the same on all (openssl rand -hex 32): without it whoever reaches the port can join.
machine=${1:?the number of this machine, from 0} first=${2:?the name or address of the first machine}"""

SLURM = FileTemplate("""\
#!/bin/bash
#SBATCH --job-name=@name
#SBATCH --nodes=@nodes
#SBATCH --ntasks-per-node=@per_node
@gpus_line#SBATCH --distribution=block
#SBATCH --signal=TERM@@@signal_seconds
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
# Add what your site asks for: --account, --partition, --time, --cpus-per-task.
@comments
# Before the time limit Slurm sends SIGTERM to the processes, which save within training.stop_seconds. Then, or when
# Slurm has taken the job's nodes away or lost one, the job is queued again.
stopped=@marker
rm -f "$stopped"
# Slurm gives it to every process of the job.
@secret
srun --kill-on-bad-exit=1 python -m hf_gpipe.train @arguments
code=$?
if [ -e "$stopped" ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
""")

KUBERNETES = FileTemplate("""\
@comments
# For Kubeflow Trainer 2: kubectl apply -f FILE. First give the pods the secret by which they know each other:
#     kubectl create secret generic @name-run --from-literal=secret="$(openssl rand -hex 32)"
# The claim @claim is mounted at /workspace, which all pods share. It has the recipe and the data; paths are relative to
# it.
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata:
  name: @name
  labels:
    trainer.kubeflow.org/framework: torch
spec:
  mlPolicy:
    numNodes: @nodes
    torch: {}
  template:
    spec:
      # A training that a signal has stopped starts again as often as needed, after a fault at most three times.
      failurePolicy:
        maxRestarts: 3
        rules:
          - action: RestartJobSetAndIgnoreMaxRestarts
            onJobFailureReasons: [PodFailurePolicy]
      replicatedJobs:
        - name: node
          template:
            metadata:
              labels:
                trainer.kubeflow.org/trainjob-ancestor-step: trainer
            spec:
              backoffLimit: 0
              podFailurePolicy:
                rules:
                  - action: FailJob
                    onExitCodes:
                      containerName: node
                      operator: In
                      values: [75]
              template:
                spec:
                  restartPolicy: Never
                  terminationGracePeriodSeconds: @grace_seconds
                  containers:
                    - name: node
                      workingDir: /workspace
                      env:
                        - name: HF_GPIPE_SECRET
                          valueFrom:
                            secretKeyRef:
                              name: @name-run
                              key: secret
                      volumeMounts:
                        - name: workspace
                          mountPath: /workspace
                        - name: shm
                          mountPath: /dev/shm
                  volumes:
                    - name: workspace
                      persistentVolumeClaim:
                        claimName: @claim
                    - name: shm
                      emptyDir:
                        medium: Memory
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: @name
spec:
  runtimeRef:
    apiGroup: trainer.kubeflow.org
    kind: TrainingRuntime
    name: @name
  trainer:
    image: @image
    numNodes: @nodes
    numProcPerNode: @per_node
@gpus_block    command:
      - bash
      - -c
      - |
@run""")

SKYPILOT = FileTemplate("""\
@comments
# sky jobs launch --env HF_GPIPE_SECRET FILE, after export HF_GPIPE_SECRET=$(openssl rand -hex 32), by which the
# machines know each other: a managed job, which comes back after a machine is lost. The output directory must be on
# storage that all machines see and that outlives them: mount a bucket or a volume there, under file_mounts or volumes.
name: @name
num_nodes: @nodes
workdir: .
resources:
@resources  job_recovery:
    max_restarts_on_errors: 3
    recover_on_exit_codes: [75]
setup: |
  pip install -e .
run: |
  machine=$SKYPILOT_NODE_RANK first=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
@run""")

RAY = FileTemplate('''\
@comments
# python FILE, or ray job submit -- python FILE. Ray ends its workers without a signal, so the steps since the last
# checkpoint are lost (training.save_steps). After a fault it starts them again, at most three times. The process group
# is Ray's, and protected by Ray alone.
import os

FOLDER = @folder  # on every machine, with the recipe and the data
ARGUMENTS = @argument_list


def train():
    """Runs in every worker, in the process group that Ray has made."""
    os.chdir(FOLDER)
    from hf_gpipe.train import main

    if code := main(ARGUMENTS):
        raise RuntimeError(f"hf_gpipe.train ended with exit code {code}")


if __name__ == "__main__":
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=@num_processes, use_gpu=@use_gpu, placement_strategy="PACK"),
        run_config=RunConfig(name="@name", failure_config=FailureConfig(max_failures=3)),
    ).fit()
''')
