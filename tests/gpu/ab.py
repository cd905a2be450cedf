
import torch, stoop.ops.kernels.linear as L
from stoop.ops.kernels.linear_tuning import Trial
from stoop.ops.kernels.linear_choice import *
for kind,N in (("norm",960),("gated",3072)):
    trial=Trial(LinearShape(kind,N,576,torch.bfloat16),torch.device("cuda"))
    for T in (8,16,32):
        ts=[Tiling(16,4,256,4),Tiling(32,4,256,4),Tiling(8,4,256,4),Tiling(64,4,256,4)]
        for sq in (False,True):
            L.SQ=sq
            print(kind,T,"dot squares" if sq else "folded",[(round(u,2),t.rows) for u,t in trial.times(T,ts)],flush=True)
