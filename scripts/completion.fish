# Completion for fish of train.py and samestep. In ~/.config/fish/config.fish:
#
#   source FOLDER_OF_THE_PROJECT/scripts/completion.fish
set -g _samestep_folder (status dirname)
function _samestep_complete
    sh $_samestep_folder/complete.sh (commandline -opc) (commandline -ct) 2>/dev/null | string split --no-empty ' '
end
for command in python python3 samestep
    complete --command $command --arguments '(_samestep_complete)'
end
